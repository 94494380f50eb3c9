"""The order by rights: the group whose right was given first is taken first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from redrb.errors import ConfigError
from redrb.orders.order import GroupFacts, Score


@dataclass(frozen=True, slots=True)
class ByAdmission:
    """Lowest number of `stream.admit` first: slow groups overtake those that were begun later."""

    name: ClassVar[str] = "admission"
    sampled: ClassVar[bool] = False

    def score(self, facts: GroupFacts) -> Score:
        """Return the number of the group's right; raises ConfigError without one."""
        if facts.right is None:
            raise ConfigError(
                'order="admission" needs a right for each group: put(..., admission=...), with '
                "what stream.admit() returned."
            )
        return float(facts.right)
