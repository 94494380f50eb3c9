"""Orders by a priority that is given at put and may be changed later, and at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from redrb.errors import ConfigError
from redrb.orders.order import GroupFacts, Score


@dataclass(frozen=True, slots=True)
class Priority:
    """Highest priority first, ties by arrival; no priority counts as 0."""

    name: ClassVar[str] = "priority"
    sampled: ClassVar[bool] = False

    def score(self, facts: GroupFacts) -> Score:
        """Return the negative priority."""
        return -(facts.priority or 0.0)


@dataclass(frozen=True, slots=True)
class Uniform:
    """At random: every waiting group has the same probability."""

    name: ClassVar[str] = "uniform"
    sampled: ClassVar[bool] = True

    def score(self, _: GroupFacts) -> Score:
        """Return the same weight for every group."""
        return 1.0


@dataclass(frozen=True, slots=True)
class Prioritized:
    """At random, with probability proportional to priority ** alpha (Schaul et al. 2016).

    No priority counts as 1; a group of priority 0 is drawn only when no other is left. A lease has
    the probabilities and importance weights of its groups. arXiv:1511.05952.

    Attributes:
        alpha: 0 is uniform, 1 is proportional to the priority.
    """

    alpha: float = 0.6
    sampled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 8:
            raise ConfigError(f"alpha={self.alpha}: it must lie between 0 and 8.")

    @property
    def name(self) -> str:
        """The name, with alpha."""
        return f"prioritized({self.alpha:g})"

    def score(self, facts: GroupFacts) -> Score:
        """Return the weight."""
        priority = 1.0 if facts.priority is None else facts.priority
        if priority < 0:
            raise ConfigError(f"priority={priority}: the order {self.name} needs priorities >= 0.")
        return float(priority**self.alpha)
