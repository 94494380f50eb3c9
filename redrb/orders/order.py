"""What an order is: a rule that gives each group a score when it is put."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

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
