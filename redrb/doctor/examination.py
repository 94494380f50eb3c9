"""`examine`: what a task counts, what is stored, and what nobody looks after, at one moment."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from redrb.damage import Reading
from redrb.stream.task.store import TaskStore

_PAGE = 1000

Name = TypeVar("Name", bound=str | bytes)


@dataclass(frozen=True, slots=True)
class ExaminedGroup:
    """One consumer group of a task, or of a partition.

    Attributes:
        waiting: Groups in its pools.
        leased: Groups in its pending list.
        stuck_takes: Takes in its queues whose process does not look any more.
        joining: 1 while it joins, when its pools are not complete.
        letters: Its dead letters, as its index says.
        dead: Leased groups by consumer, of those whose deadline is over.
        lost: Leased groups by slot, of each consumer that the task does not know.
    """

    name: str
    waiting: int
    leased: int
    stuck_takes: int
    joining: int
    letters: int
    dead: Mapping[str, int]
    lost: Mapping[str, Mapping[str, int]]

    @property
    def lost_groups(self) -> dict[str, int]:
        """Leased groups of each consumer that the task does not know."""
        return {consumer: sum(slots.values()) for consumer, slots in self.lost.items()}


@dataclass(frozen=True, slots=True)
class Examination:
    """A task, or one of its partitions.

    Attributes:
        partition: Number of the partition; None for a task without partitions.
        entries: Entries of its stream.
        archived: Groups of its history.
        letters: Its dead letters.
        orphans: Entries of failed puts, the first page of them.
        lost_settings: 1 if the task's own key is lost, and other keys are not.
        lost_puts: 1 if the record of its puts is lost, damaged, or contradicts the stream.
        stuck_puts: Puts in the queue for room whose process does not look any more.
        stuck_admissions: The same in the queue for the right to begin groups.
        lost_rights: Rights of dead makers, and rights that are held for too long.
        lease_ms: Silence after which consumers of the task are dead.
        now: The task's clock, in milliseconds: deadlines up to it are over.
    """

    store: TaskStore
    partition: int | None
    groups: int
    entries: int
    facts: int
    archived: int
    letters: int
    orphans: int
    more_orphans: int
    lost_settings: int
    lost_puts: int
    stuck_puts: int
    stuck_admissions: int
    lost_rights: int
    lease_ms: int
    now: int
    consumer_groups: tuple[ExaminedGroup, ...]

    @property
    def subject(self) -> str:
        """The subject of its findings."""
        name = f"task {self.store.task}"
        return name if self.partition is None else f"{name}, partition {self.partition}"


def examine(store: TaskStore, partition: int | None = None) -> Examination | None:
    """Examine a task, or one of its partitions; None if it does not exist.

    Raises:
        StoreDenied: The user may not read it.
        StoreUnavailable: Redis stayed away.
    """
    reply = store.run("doctor/examine", [""])
    if not reply:
        return None
    with Reading(f"task {store.task!r}"):
        figures, *page = reply
        found = _pairs(figures)
        now, late_rights = found["now"], found.pop("late_rights")
        groups: list[ExaminedGroup] = []
        while page:  # each page goes on behind the last name of the page before
            groups += (_group(store, *each, now=now) for each in page)
            _, *page = store.run("doctor/examine", [page[-1][0]]) or [None]
        key, held = f"{store.keys.prefix}holders", 0
        for maker in deadlines_over(store, b"makers", now):
            held += store.client.execute("ZLEXCOUNT", key, b"[" + maker + b"/", b"(" + maker + b"0")
        return Examination(
            store=store,
            partition=partition,
            lost_rights=late_rights + held,
            consumer_groups=tuple(groups),
            **found,
        )


def _group(store: TaskStore, name: bytes, figures: Sequence[Any], *, now: int) -> ExaminedGroup:
    leased = _leased(store, name)
    known = deadlines_of(store, b"consumers:" + name, list(leased))
    dead = map(_text, deadlines_over(store, b"consumers:" + name, now))
    return ExaminedGroup(
        name=_text(name),
        dead={consumer: sum(leased[consumer].values()) for consumer in dead},
        lost={one: leased[one] for one, deadline in known.items() if deadline is None},
        **_pairs(figures),
    )


def deadlines_over(store: TaskStore, kind: bytes, now: int) -> Iterator[bytes]:
    """Yield the members of a task's sorted set of deadlines whose deadline is over.

    `kind` is the sorted set, such as `makers`, and `now` the task's clock, in milliseconds.
    """
    key = store.keys.prefix.encode() + kind
    for first in itertools.count(0, _PAGE):
        page = store.client.execute("ZRANGEBYSCORE", key, "-inf", now, "LIMIT", first, _PAGE)
        yield from page
        if len(page) < _PAGE:
            return


def _leased(store: TaskStore, group: bytes) -> dict[str, dict[str, int]]:
    """Return how many groups each slot leases, by consumer; slots without a lease are left out."""
    leased: dict[str, dict[str, int]] = defaultdict(dict)
    for reply in store.client.execute("XINFO", "CONSUMERS", store.keys.stream, group):
        fields = dict(zip(reply[::2], reply[1::2], strict=True))
        slot, groups = _text(fields[b"name"]), int(fields[b"pending"])
        if groups:
            consumer, _, number = slot.rpartition("/")
            leased[consumer if number.replace(".", "").isdecimal() else slot][slot] = groups
    return leased


def deadlines_of(store: TaskStore, kind: bytes, names: Sequence[Name]) -> dict[Name, bytes | None]:
    """Return the deadline of each name in a task's sorted set; None where it has none."""
    key = store.keys.prefix.encode() + kind
    known: dict[Name, bytes | None] = {}
    for first in range(0, len(names), _PAGE):
        page = names[first : first + _PAGE]
        known |= zip(page, store.client.execute("ZMSCORE", key, *page), strict=True)
    return known


def _pairs(flat: Sequence[Any]) -> dict[str, Any]:
    return {_text(name): int(n) for name, n in zip(flat[::2], flat[1::2], strict=True)}


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
