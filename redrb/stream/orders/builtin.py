"""The built-in orders, and their names: a new order is added here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import ClassVar

from redrb.errors import ConfigError
from redrb.stream.orders.order import GroupFacts, Order, Score


@dataclass(frozen=True, slots=True)
class Fifo:
    """First in, first out; groups that return from a lease keep their place.

    It costs nothing at put, because the stream in Redis holds the groups in this order.
    """

    name: ClassVar[str] = "fifo"
    sampled: ClassVar[bool] = False

    def score(self, _: GroupFacts) -> Score:
        """Return the position of arrival."""
        return "arrival"


@dataclass(frozen=True, slots=True)
class Lifo:
    """Last in, first out: a stack."""

    name: ClassVar[str] = "lifo"
    sampled: ClassVar[bool] = False

    def score(self, _: GroupFacts) -> Score:
        """Return the negative position of arrival."""
        return "-arrival"


# scores by policy version never change, since all groups grow stale at the same rate
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


_ORDERS: dict[str, Order] = {
    order.name: order
    for order in (Fifo(), Lifo(), Stalest(), Freshest(), Priority(), Uniform(), ByAdmission())
}
_PRIORITIZED = re.compile(r"prioritized(?:\(([0-9.e+-]{1,12})\))?")


def known_order(name: str) -> Order | None:
    """Return the built-in order with this name; None if there is none."""
    matched = _PRIORITIZED.fullmatch(name)
    if matched is None:
        return _ORDERS.get(name)
    try:
        return Prioritized() if matched[1] is None else Prioritized(float(matched[1]))
    except ValueError:
        return None


def order_named(name: str) -> Order:
    """Return the built-in order with this name; raises ConfigError if there is none."""
    order = known_order(name)
    if order is None:
        known = ", ".join(sorted([*_ORDERS, "prioritized"]))
        raise ConfigError(f"unknown order {name!r}: use one of {known}, or an Order object.")
    return order


def ignores_priority(order: Order | None) -> bool:
    """Return whether an order does not depend on priorities; False if that is unknown."""
    return isinstance(order, Fifo | Lifo | Stalest | Freshest | Uniform | ByAdmission)
