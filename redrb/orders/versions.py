"""Orders by policy version. All groups grow stale at the same rate, so scores never change."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from redrb.orders.order import GroupFacts, Score


@dataclass(frozen=True, slots=True)
class Stalest:
    """Oldest policy version first, ties by arrival; groups without a version come last."""

    name: ClassVar[str] = "stalest"
    sampled: ClassVar[bool] = False

    def score(self, facts: GroupFacts) -> Score:
        """Return the version."""
        return math.inf if facts.policy_version is None else facts.policy_version


@dataclass(frozen=True, slots=True)
class Freshest:
    """Newest policy version first, ties by arrival; groups without a version come last."""

    name: ClassVar[str] = "freshest"
    sampled: ClassVar[bool] = False

    def score(self, facts: GroupFacts) -> Score:
        """Return the negative version."""
        return math.inf if facts.policy_version is None else -facts.policy_version
