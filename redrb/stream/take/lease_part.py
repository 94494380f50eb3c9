"""One part of a lease: the groups of one task that one holder in Redis leases."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from redrb.codec import GroupLayout
from redrb.errors import LeaseLost
from redrb.experience import Status
from redrb.stream.take.cause import NO_CAUSE, Cause
from redrb.stream.take.scripts import Outcome
from redrb.stream.task.origin import Origin

if TYPE_CHECKING:
    from redrb.tracing.spans import LeaseTrace


class Holder(Protocol):
    """The place in Redis that leases groups: a slot of a consumer, or a rank's step."""

    def finish(
        self, outcome: Outcome, ids: Sequence[int], *, reason: Cause, samples: int, ends: bool
    ) -> bool:
        """End leased groups; False when another consumer has taken them over.

        Args:
            outcome: How they end.
            ids: The groups.
            reason: Why they failed, or are rejected.
            samples: Samples in the groups.
            ends: Whether these are the last groups of the part.
        """

    def abandon(self, ids: tuple[int, ...]) -> None:
        """Release groups of a lease that was garbage-collected, later; it must not block."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Weights by which an order drew groups.

    Attributes:
        weights: Weight of each drawn group, by id.
        total: Sum of the weights of all groups that waited.
    """

    weights: Mapping[int, float]
    total: float


@dataclass(frozen=True, slots=True)
class Expiry:
    """The rule by which a group expired; a rule that was not given is None.

    Attributes:
        current_version: Weight version at that time.
        max_staleness: Rule for a group's oldest version.
        max_token_staleness: Rule for the newest token.
    """

    current_version: int
    max_staleness: int | None
    max_token_staleness: int | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the three words that Redis stores."""
        version, *rules = text.split()
        oldest, newest_token = (None if rule == "-" else int(rule) for rule in rules)
        return cls(int(version), oldest, newest_token)


class LeasePart:
    """Groups of one task that one holder leases until they are ended.

    Attributes:
        task: Name of the task.
        holder: The groups' place in Redis.
        incarnation: Incarnation of the task in which the groups were leased.
        layouts: The groups that are still leased, checked and not decoded yet, by id, in the order
            of the batch.
        draw: Weights by which the order drew the groups; None if it does not draw.
        expiries: Why groups expired, by id; only of groups taken with status EXPIRED.
        status: Status in which the groups were taken.
        rollouts: Ids of groups that a `ReplayBuffer` has put.
        origin: The task and consumer group, which forwarded groups name; None in tests.
        first_ids: First id of the groups that were dead letters and have another id now.
        trace: Spans of the groups that are traced; None: no group is.
    """

    def __init__(
        self,
        task: str,
        groups: Sequence[tuple[int, GroupLayout]],
        holder: Holder,
        *,
        incarnation: str = "",
        draw: Draw | None = None,
        expiries: Mapping[int, Expiry | None] | None = None,
        status: Status = Status.COMPLETED,
        rollouts: Collection[int] = (),
        origin: Origin | None = None,
        first_ids: Mapping[int, int] | None = None,
        trace: LeaseTrace | None = None,
    ) -> None:
        self.task = task
        self.holder = holder
        self.incarnation = incarnation
        self.layouts = dict(groups)
        self.draw = draw
        self.expiries = dict(expiries or {})
        self.status = status
        self.rollouts = rollouts
        self.origin = origin
        self.first_ids = first_ids or {}
        self.trace = trace
        # a part that nobody ended and nobody references any more is released
        self._finalizer = weakref.finalize(self, holder.abandon, tuple(self.layouts))
        self._finalizer.atexit = False

    def __len__(self) -> int:
        """Return the number of groups that are still leased."""
        return len(self.layouts)

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of the groups that are still leased."""
        return tuple(self.layouts)

    @property
    def samples(self) -> int:
        """Samples in the groups that are still leased."""
        return sum(layout.samples for layout in self.layouts.values())

    def end(self, outcome: Outcome, ids: Sequence[int], reason: Cause = NO_CAUSE) -> None:
        """End groups of this part in Redis.

        Raises:
            LeaseLost: Another consumer has taken them over.
        """
        samples = sum(self.layouts[seq].samples for seq in ids)
        ends = len(ids) == len(self.layouts)
        held = self.holder.finish(outcome, ids, reason=reason, samples=samples, ends=ends)
        self._forget(ids if held else self.ids, outcome if held else "lost")
        if not held:
            raise self._lost(ids)

    def conclude(self, *, held: bool) -> None:
        """Note that another request has ended the whole part.

        Raises:
            LeaseLost: It has not, because another consumer has taken the groups over.
        """
        ids = self.ids
        self._forget(ids, "ack" if held else "lost")
        if not held:
            raise self._lost(ids)

    def forget(self) -> None:
        """Note that another request has ended the whole part unread; its groups wait again."""
        self._forget(self.ids, "release")

    def abandon(self) -> None:
        """Let the holder release the groups that are still leased, later; never blocks."""
        if self.layouts:
            self._end_trace(self.ids, "release")
            self.layouts = {}
            self._finalizer()

    def note_used(self) -> None:
        """Note that the groups were handed over to the training step."""
        if self.trace is not None:
            self.trace.used()

    def _end_trace(self, ids: Collection[int], outcome: str) -> None:
        if self.trace is not None:
            self.trace.end(outcome, ids)

    def _forget(self, ids: Collection[int], outcome: str) -> None:
        self._end_trace(ids, outcome)
        for seq in ids:
            del self.layouts[seq]
        if not self.layouts:
            self._finalizer.detach()

    def _lost(self, ids: Sequence[int]) -> LeaseLost:
        return LeaseLost(
            task=self.task,
            ids=tuple(ids),
            why="this consumer's heartbeat stopped for longer than lease_ms, and other consumers "
            "took the groups over, or Redis has lost the task's data. Drop the result of training "
            "on them and take again.",
        )
