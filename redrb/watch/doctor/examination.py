"""`examine`: what a task counts, what is stored, and what nobody looks after, at one moment."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from redrb.stream.task.store import TaskStore
from redrb.unpacking import Reading
from redrb.watch.doctor.calls import Examine, GroupFigures, TaskFigures

_PAGE = 1000

Name = TypeVar("Name", bound=str | bytes)


class ExaminedGroup(GroupFigures, frozen=True, kw_only=True):
    """One consumer group of a task.

    Attributes:
        dead: Leased groups by consumer, of those whose deadline is over.
        lost: Leased groups by slot, of each consumer that the task does not know.
    """

    dead: Mapping[str, int]
    lost: Mapping[str, Mapping[str, int]]

    @property
    def lost_groups(self) -> dict[str, int]:
        """Leased groups of each consumer that the task does not know."""
        return {consumer: sum(slots.values()) for consumer, slots in self.lost.items()}


class Examination(TaskFigures, frozen=True, kw_only=True):
    """A task at one moment; `lost_rights` are held by dead makers, or for too long."""

    store: TaskStore
    lost_rights: int
    consumer_groups: tuple[ExaminedGroup, ...]

    @property
    def subject(self) -> str:
        """The subject of its findings."""
        return f"task {self.store.task}"


def examine(store: TaskStore) -> Examination | None:
    """Examine a task; None if it does not exist."""
    page = store.call(Examine())
    if page is None or page.task is None:
        return None
    task = page.task
    with Reading(f"task {store.task!r}"):
        groups: list[ExaminedGroup] = []
        while page and page.groups:
            groups += (_group(store, each, task.now) for each in page.groups)
            page = store.call(Examine(page.groups[-1].name))
        key, held = f"{store.keys.prefix}holders", 0
        for maker in deadlines_over(store, "makers", task.now):
            held += store.client.execute("ZLEXCOUNT", key, b"[" + maker + b"/", b"(" + maker + b"0")
        return Examination(
            **msgspec.structs.asdict(task),
            store=store,
            lost_rights=task.late_rights + held,
            consumer_groups=tuple(groups),
        )


def _group(store: TaskStore, figures: GroupFigures, now: int) -> ExaminedGroup:
    name = figures.name
    leased = _leased(store, name)
    known = deadlines_of(store, f"consumers:{name}", list(leased))
    dead = map(_text, deadlines_over(store, f"consumers:{name}", now))
    return ExaminedGroup(
        **msgspec.structs.asdict(figures),
        dead={consumer: sum(leased.get(consumer, {}).values()) for consumer in dead},
        lost={consumer: slots for consumer, slots in leased.items() if known[consumer] is None},
    )


def deadlines_over(store: TaskStore, kind: str, now: int) -> Iterator[bytes]:
    """Yield the members of a task's sorted set of deadlines whose deadline is over.

    `kind` is the sorted set, such as `makers`, and `now` the task's clock, in milliseconds.
    """
    key = f"{store.keys.prefix}{kind}"
    for first in itertools.count(0, _PAGE):
        page = store.client.execute("ZRANGEBYSCORE", key, "-inf", now, "LIMIT", first, _PAGE)
        yield from page
        if len(page) < _PAGE:
            return


def _leased(store: TaskStore, group: str) -> dict[str, dict[str, int]]:
    """Return how many groups each slot leases, by consumer; slots without a lease are left out."""
    leased: dict[str, dict[str, int]] = defaultdict(dict)
    for reply in store.client.execute("XINFO", "CONSUMERS", store.keys.stream, group):
        fields = dict(zip(reply[::2], reply[1::2], strict=True))
        slot, groups = _text(fields[b"name"]), int(fields[b"pending"])
        if groups:
            consumer, _, number = slot.rpartition("/")
            leased[consumer if number.replace(".", "").isdecimal() else slot][slot] = groups
    return leased


def deadlines_of(store: TaskStore, kind: str, names: Sequence[Name]) -> dict[Name, bytes | None]:
    """Return the deadline of each name in a task's sorted set; None where it has none."""
    key = f"{store.keys.prefix}{kind}"
    known: dict[Name, bytes | None] = {}
    for first in range(0, len(names), _PAGE):
        page = names[first : first + _PAGE]
        known |= zip(page, store.client.execute("ZMSCORE", key, *page), strict=True)
    return known


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
