"""`LeasePart`: the groups of one task that one holder in Redis leases, from their claim on."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Protocol, Self

from redrb import forks
from redrb.codec import GroupLayout, parse_group
from redrb.connection.client import Request
from redrb.errors import DecodeError, LeaseLost
from redrb.experience import Status
from redrb.lua.pages import PAGES
from redrb.stream.take.calls import Outcome
from redrb.stream.take.cause import NO_CAUSE, Cause
from redrb.stream.take.consumer import Consumer
from redrb.stream.take.rollout_reading import ROLLOUT, read_rollouts
from redrb.stream.task.entries import member_of
from redrb.stream.task.origin import Origin
from redrb.stream.task.store import TaskStore
from redrb.unpacking import Reading

_log = logging.getLogger("redrb")


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


def claimed_part(
    store: TaskStore,
    consumer: Consumer,
    entries: Sequence[tuple[int, bytes | None]],
    holder: Holder,
    *,
    status: Status,
    incarnation: str,
    draw: Draw | None,
    first_ids: Mapping[int, int],
    least: int,
) -> LeasePart | None:
    """Return the part of a lease that holds claimed entries.

    Groups that cannot be decoded go to the dead letters, with the reason.

    Args:
        entries: Id and payload of each group that a script claimed for `holder`; None: it is gone.
        first_ids: First id of the groups that were requeued with another one.
        least: Fewest groups in a part. A claim with fewer, or of which a group cannot be decoded,
            is released.

    Returns:
        The part; None when the claim was released, or another consumer has taken it over.

    Raises:
        ConfigError, RecordError: Groups of rollouts cannot be read. After this, and after any error
            of the reader, the claim was released.
    """
    good: list[tuple[int, GroupLayout]] = []
    bad: list[tuple[int, DecodeError]] = []
    for seq, payload in entries:
        try:
            if payload is None:
                raise DecodeError("the payload is gone")
            good.append((seq, parse_group(payload)))
        except DecodeError as error:
            bad.append((seq, error.with_traceback(None)))
    for seq, why in bad:
        _log.error("task %r: group %d cannot be decoded: %s", store.task, seq, why)
        ends = not good and seq == bad[-1][0]
        reason = Cause.of(why, "cannot be decoded: ")
        if holder.end_request("reject", [seq], reason=reason, samples=0, ends=ends).result():
            return None  # it is lost
    ids = [seq for seq, _ in good]
    rollouts = frozenset(seq for seq, layout in good if ROLLOUT in layout.extras[0])
    try:
        for place, (seq, layout) in enumerate(good if rollouts else ()):
            if seq in rollouts:
                good[place] = seq, read_rollouts(store.task, seq, layout, consumer.reader)
    except BaseException:
        holder.release(ids)
        raise
    if not bad and len(good) >= least:
        expiries = _expiries(store, consumer.group, ids) if status is Status.EXPIRED else {}
        return LeasePart(
            store.task,
            good,
            holder,
            incarnation=incarnation,
            draw=draw,
            expiries=expiries,
            status=status,
            rollouts=rollouts,
            origin=Origin(store, consumer.group, incarnation),
            first_ids=first_ids,
        )
    if good or not bad:
        holder.release(ids)
    return None


def _expiries(store: TaskStore, group: str, ids: Sequence[int]) -> dict[int, Expiry | None]:
    key = f"{store.keys.prefix}expiries:{group}"
    texts = store.client.execute("HMGET", key, *map(member_of, ids))
    with Reading("the rules by which groups expired"):
        return {
            seq: text and Expiry.parse(text.decode()) for seq, text in zip(ids, texts, strict=True)
        }
