"""`LeasePart`: the groups of one task that one holder in Redis leases, and how they end.

They end in pages, in several parts of a lease at once.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Protocol, Self, TypeAlias

from redrb import forks
from redrb.codec import GroupLayout
from redrb.connection.client import Request
from redrb.connection.deadline import GRACE_S, Deadline
from redrb.errors import LeaseLost, StoreError, StoreUnavailable
from redrb.experience import Status
from redrb.lua.pages import PAGES
from redrb.stream.take.calls import Outcome
from redrb.stream.take.cause import NO_CAUSE, Cause
from redrb.stream.task.origin import Origin


class Holder(Protocol):
    """The place in Redis that leases groups: a slot of a consumer, or of rank 0."""

    def end_request(
        self, outcome: Outcome, ids: Sequence[int], *, reason: Cause, samples: int, ends: bool
    ) -> Request[str]:
        """Return the request that ends leased groups; with `ends` they are the last of the part.

        Its result is why the part is lost, as a sentence that says what to do; "" if it was held.
        """

    def release(self, ids: Sequence[int]) -> None:
        """Requeue all groups of a claim that does not become a lease, in pages."""

    def abandon(self, ids: tuple[int, ...]) -> None:
        """Release groups of a lease that was garbage-collected, later; it must not block."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Weights by which an order drew groups; `total` is that of all groups that waited."""

    weights: Mapping[int, float]
    total: float


@dataclass(frozen=True, slots=True)
class Expiry:
    """The rule by which a group expired; a rule that was not given is None.

    Attributes:
        current_version: Weight version at that time.
        max_staleness: Rule for a group's oldest version.
        max_token_staleness: Rule for the newest token.
        number: Place of the rule among those of a `ReplayBuffer`, by time; 0 for any other.
    """

    current_version: int
    max_staleness: int | None
    max_token_staleness: int | None
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the three or four words that Redis stores."""
        version, oldest, newest, *number = text.split()
        rules = [None if rule == "-" else int(rule) for rule in (oldest, newest)]
        return cls(int(version), rules[0], rules[1], *map(int, number))


@dataclass(eq=False, repr=False)
class LeasePart:
    """Groups of one task that one holder leases until they are ended.

    Attributes:
        incarnation: Incarnation of the task in which the groups were leased.
        layouts: The groups that are still leased, checked, not decoded, by id, in batch order.
        draw: Weights by which the order drew the groups; None if it does not draw.
        expiries: Why groups expired, by id; only of groups taken with status EXPIRED.
        rollouts: Ids of groups that a `ReplayBuffer` has put.
        origin: The task and consumer group, which forwarded groups name; None in tests.
        first_ids: First id of the groups that were dead letters and have another id now.
        decided: Groups that ended as an earlier call asked for, until an error has named them.
    """

    task: str
    groups: InitVar[Sequence[tuple[int, GroupLayout]]]
    holder: Holder
    _: KW_ONLY
    incarnation: str = ""
    draw: Draw | None = None
    expiries: Mapping[int, Expiry | None] = field(default_factory=dict)
    status: Status = Status.COMPLETED
    rollouts: Collection[int] = ()
    origin: Origin | None = None
    first_ids: Mapping[int, int] = field(default_factory=dict)
    decided: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False)
    # group -> ending that was asked for, while its reply was missing
    _asked: dict[int, tuple[Outcome, Cause]] = field(default_factory=dict, init=False)
    _process: object = field(default_factory=lambda: forks.process, init=False)

    def __post_init__(self, groups: Sequence[tuple[int, GroupLayout]]) -> None:
        self.layouts = dict(groups)
        # groups that were not ended are released when this object is garbage-collected
        self._finalizer = weakref.finalize(self, self.holder.abandon, tuple(self.layouts))
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

    def pages(self, outcome: Outcome, ids: Sequence[int]) -> list[tuple[int, ...]]:
        """Split groups into pages, of which a server ends each without keeping others waiting.

        There is at least one page; it is empty if there are no groups.
        """
        if outcome not in ("fail", "reject"):
            most = PAGES["ended"]
            return [tuple(ids[i : i + most]) for i in range(0, max(len(ids), 1), most)]
        most, most_bytes = PAGES["failed"], PAGES["copied_bytes"]
        pages: list[list[int]] = [[]]
        size = 0
        for seq in ids:
            nbytes = self.layouts[seq].nbytes
            if pages[-1] and (len(pages[-1]) == most or size + nbytes > most_bytes):
                pages.append([])
                size = 0
            pages[-1].append(seq)
            size += nbytes
        return list(map(tuple, pages))

    def end_request(
        self, outcome: Outcome, ids: Sequence[int], reason: Cause = NO_CAUSE
    ) -> Request[str]:
        """Return the request that ends a page of this part; `note_ended` takes its result."""
        self.check_own()
        samples = sum(self.layouts[seq].samples for seq in ids)
        ends = len(ids) == len(self.layouts)
        return self.holder.end_request(outcome, ids, reason=reason, samples=samples, ends=ends)

    def check_own(self) -> None:
        """Raise LeaseLost in a forked process: the lease belongs to its parent."""
        if self._process is not forks.process:
            raise LeaseLost(
                task=self.task,
                ids=self.ids,
                why="it belongs to the process from which this one was forked, which ends it. Take "
                "groups in this process.",
            )

    def note_asked(self, outcome: Outcome, ids: Collection[int], reason: Cause = NO_CAUSE) -> None:
        """Note that groups may have ended: a request was sent, and its reply was not read."""
        for seq in ids:
            self._asked.setdefault(seq, (outcome, reason))

    def asked_otherwise(
        self, outcome: Outcome, ids: Collection[int]
    ) -> dict[tuple[Outcome, Cause], tuple[int, ...]]:
        """Return the groups that an earlier request may have ended in another way, by that way."""
        found: dict[tuple[Outcome, Cause], tuple[int, ...]] = {}
        for seq in ids if self._asked else ():
            asked = self._asked.get(seq)
            if asked is not None and asked[0] != outcome:
                found[asked] = (*found.get(asked, ()), seq)
        return found

    def note_ended(self, ids: tuple[int, ...], loss: str = "") -> None:
        """Note the result of a request that has ended groups.

        Raises:
            LeaseLost: It has not, for the reason `loss`: all groups that were left are lost.
        """
        over = self.ids if loss else ids
        for seq in over:
            del self.layouts[seq]
        if not self.layouts:
            self._finalizer.detach()
        if loss:
            raise LeaseLost(task=self.task, ids=over, why=loss)

    def abandon(self) -> None:
        """Let the holder release the groups that are still leased, later; never blocks."""
        if self.layouts:
            self.layouts = {}
            self._finalizer()


Chosen: TypeAlias = list[tuple[LeasePart, tuple[int, ...]]]

Errors: TypeAlias = dict[LeasePart, LeaseLost | StoreError]

Pages: TypeAlias = dict[LeasePart, deque[tuple[int, ...]]]  # still to be ended


def end_parts(outcome: Outcome, chosen: Chosen, reason: Cause = NO_CAUSE) -> Errors:
    """End groups of several parts; returns the error of each part that has one.

    Each part is ended page after page, so that other clients are served in between. The requests of
    all parts are sent before the first reply is read. Parts whose server is away are tried again
    when all others are ended. Their retries share the time of one request.

    Groups that an earlier call, which was cut off, was to end in another way end in that way, and a
    `LeaseLost` names them: a release may have reached Redis and given them to another consumer, so
    that an acknowledgement now would count them twice.
    """
    errors: Errors = {}
    _end_in_pages(outcome, _others_than_decided(outcome, chosen, errors), reason, errors)
    for part, _ in chosen:
        if part.decided and not isinstance(errors.get(part), StoreError):
            errors[part] = _named(part, errors.get(part))
    return errors


def _end_in_pages(outcome: Outcome, chosen: Chosen, reason: Cause, errors: Errors) -> None:
    left = {part: deque(part.pages(outcome, ids)) for part, ids in chosen}
    if len(left) > 1:
        _end_reachable(outcome, left, reason, errors)
    shared = len(left) > 1
    with ExitStack() as scope:
        for part, pages in left.items():
            while pages and part not in errors:
                request = part.end_request(outcome, pages[0], reason)
                if shared:
                    scope.enter_context(Deadline(request.retry_s))
                    shared = False
                _finish(outcome, part, pages, request, reason, errors)


def raise_alone(error: Exception | None) -> None:
    """Raise an error that this frame does not keep: it would keep a lease that is dropped."""
    try:
        if error is not None:
            raise error
    finally:
        del error


def _others_than_decided(outcome: Outcome, chosen: Chosen, errors: Errors) -> Chosen:
    """End groups as an earlier call, which was cut off, asked; returns all other groups."""
    others: Chosen = []
    for part, ids in chosen:
        before = part.asked_otherwise(outcome, ids)
        for (earlier, reason), asked in before.items():
            _end_in_pages(earlier, [(part, asked)], reason, errors)
            if part in errors:
                break
            part.decided[_DONE[earlier]] = (*part.decided.get(_DONE[earlier], ()), *asked)
        left = tuple(seq for seq in ids if seq in part.layouts)
        if part not in errors and (left or not before):
            others.append((part, left))
    return others


def _named(part: LeasePart, error: LeaseLost | StoreError | None) -> LeaseLost:
    """Return the error that names the decided groups of a part, and those of its own error."""
    lost = tuple(seq for ids in part.decided.values() for seq in ids)
    why = f"an earlier call, which was cut off, has {' and '.join(part.decided)} them."
    part.decided = {}
    if isinstance(error, LeaseLost):
        lost, why = (*lost, *error.ids), f"{error.why} Of some of them, {why}"
    return LeaseLost(task=part.task, ids=lost, why=why)


_DONE: dict[Outcome, str] = {
    "ack": "acknowledged",
    "expire": "expired",
    "release": "released",
    "fail": "failed",
    "reject": "rejected",
}


def _end_reachable(outcome: Outcome, left: Pages, reason: Cause, errors: Errors) -> None:
    """End all parts whose servers answer at once; pages of the others stay in `left`."""
    turn = list(left)
    while turn:
        sent: dict[LeasePart, Request[str]] = {}
        try:
            with Deadline(at_most=GRACE_S, repeat_s=0.0):
                for part in turn:
                    sent[part] = part.end_request(outcome, left[part][0], reason)
                    sent[part].begin()
                for part in turn:
                    _finish(outcome, part, left[part], sent.pop(part), reason, errors)
        finally:
            for part, request in sent.items():
                part.note_asked(outcome, left[part][0], reason)
                request.drop()
        turn = [part for part in turn if left[part] and part not in errors]
        for part in left:
            if isinstance(errors.get(part), StoreUnavailable):
                del errors[part]  # it is tried again


def _finish(
    outcome: Outcome,
    part: LeasePart,
    pages: deque[tuple[int, ...]],
    request: Request[str],
    reason: Cause,
    errors: Errors,
) -> None:
    """Read the reply to the request that ends the first page, and note the result."""
    try:
        part.note_ended(pages[0], request.result())
        pages.popleft()
    except (LeaseLost, StoreError) as error:
        errors[part] = error.with_traceback(None)  # it would keep `errors`, and so the part
        if isinstance(error, StoreUnavailable) and error.uncertain:
            part.note_asked(outcome, pages[0], reason)
    except BaseException:
        part.note_asked(outcome, pages[0], reason)
        raise
