"""The protocol of an order: it gives each group a score when the group is put."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from redrb.errors import ConfigError
from redrb.experience import Status

MOST_WEIGHT = 1e100
"""Largest score in a sampled order: sums of weights stay finite, however many groups wait."""

Score: TypeAlias = float | Literal["arrival", "-arrival"]
"""A number, or the group's position of arrival, or its negative."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The facts of a group that a score may depend on.

    Attributes:
        policy_version: Oldest policy version of its samples and their tokens; None if unknown.
        priority: Priority given to `put` or `update_priority`; None if none was given.
        samples: Samples in the group.
        nbytes: Stored bytes.
        status: Status of the group.
        right: Number of its right of admission; None if it was put without one.
    """

    policy_version: int | None
    priority: float | None
    samples: int
    nbytes: int
    status: Status
    right: int | None = None


class Order(Protocol):
    """A policy that chooses among the waiting groups of a task.

    Pass an object with these members as `order=` to every stream that puts. Streams that only take
    need not have it, because Redis keeps the scores.
    """

    @property
    def name(self) -> str:
        """Name that the task stores; orders with different scores have different names."""

    @property
    def sampled(self) -> bool:
        """Whether groups are drawn at random, with probabilities proportional to their scores.

        Otherwise the lowest score is taken first, ties by arrival.
        """

    def score(self, facts: GroupFacts, /) -> Score:
        """Return a group's score."""


def check_order(order: object) -> None:
    """Raise ConfigError unless `name`, `sampled` and `score` have the right types."""
    name, sampled = getattr(order, "name", None), getattr(order, "sampled", None)
    scores = callable(getattr(order, "score", None)) and not isinstance(order, type)
    if not (isinstance(name, str) and name and isinstance(sampled, bool) and scores):
        raise ConfigError(
            f"order={order!r}: an order is a name, or an object with `name` (a str), `sampled` "
            "(False: the lowest score is taken first, True: scores are weights to draw by) and "
            "`score(facts)`."
        )


def checked_score(order: Order, facts: GroupFacts) -> Score:
    """Return the score that an order gives a group.

    Raises:
        ConfigError: It is neither a number nor a position of arrival, or no weight from 0 to 1e100.
    """
    score: object = order.score(facts)
    if score in ("arrival", "-arrival") and not order.sampled:
        return score
    if isinstance(score, int | float) and not isinstance(score, bool):
        number = _as_float(score)
        if not math.isnan(number) and (not order.sampled or 0 <= number <= MOST_WEIGHT):
            return number
    raise ConfigError(
        f"order {order.name!r} returned the score {score!r:.80}: return a number, which lies "
        f"between 0 and {MOST_WEIGHT:g} in a sampled order."
    )


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # an int
        return math.inf if number > 0 else -math.inf
