"""What an order is: a rule that gives each group a score when it is put."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from redrb.errors import ConfigError
from redrb.experience import Status

Score: TypeAlias = float | Literal["arrival", "-arrival"]
"""A number, or the group's place in the order of arrival, or the opposite of it."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What an order may look at.

    Attributes:
        policy_version: Oldest policy version of its samples and their tokens; None: none is known.
        priority: What put or `update_priority` was given; None: nothing.
        samples: Samples in the group.
        nbytes: Bytes, as stored.
        status: Its status.
    """

    policy_version: int | None
    priority: float | None
    samples: int
    nbytes: int
    status: Status


class Order(Protocol):
    """A policy that chooses among the waiting groups of a task.

    An order of your own is one such object, given as `order=` by those who put. Redis keeps the
    scores, so whoever only takes need not know it.
    """

    @property
    def name(self) -> str:
        """What the task remembers; it says all that the scores depend on."""

    @property
    def sampled(self) -> bool:
        """Whether scores are weights: groups are drawn with probabilities proportional to them.

        Else the lowest score is taken first, ties by arrival.
        """

    def score(self, facts: GroupFacts, /) -> Score:
        """Return a group's score."""


def check_order(order: object) -> None:
    """Refuse what is no order.

    Raises:
        ConfigError: It has no name, does not say whether it draws, or cannot score.
    """
    name, sampled = getattr(order, "name", None), getattr(order, "sampled", None)
    scores = callable(getattr(order, "score", None)) and not isinstance(order, type)
    if not (isinstance(name, str) and name and isinstance(sampled, bool) and scores):
        raise ConfigError(
            f"order={order!r}: an order is a name, or an object with `name` (a str), `sampled` "
            "(False: the lowest score is taken first, True: scores are weights to draw by) and "
            "`score(facts)`."
        )


def check_score(order: Order, score: object) -> None:
    """Refuse a score that Redis could not sort by.

    Raises:
        ConfigError: It is neither a number nor the place of arrival, or a weight that is not >= 0.
    """
    if score in ("arrival", "-arrival") and not order.sampled:
        return
    number = score if isinstance(score, int | float) else math.nan
    if 0 <= number < math.inf or (not order.sampled and not math.isnan(number)):
        return
    raise ConfigError(
        f"order {order.name!r} gave the score {score!r}: it must be a number, or a finite weight "
        ">= 0 where the order draws."
    )
