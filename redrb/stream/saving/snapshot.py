"""What a saved task is made of, and reading it from a task that goes on meanwhile.

A snapshot is everything that was stored during all of its reading, once, with counters of its
beginning. Groups are read a page at a time, payload first: what ends in between is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from redrb.connection.transport import Argument, Reply
from redrb.errors import ConfigError, RedrbError
from redrb.lua.scripts import load, run
from redrb.stream.task.entries import ID_BASE
from redrb.stream.task.facts import Facts, unpack_facts
from redrb.stream.task.store import TaskStore

PAGE_GROUPS = 32
"""Most groups that are read, or restored, in one step."""

PAGE_BYTES = 4 << 20
"""Bytes of them that are aimed at; one group may be larger."""

COUNTERS = (
    *("last", "put", "samples_put", "bytes_put", "filtered", "evicted", "arrived_stale"),
    *("version", "floor"),
)
"""Fields of a task that count; what is neither here nor transient is a setting."""

ENDED = ("acked", "expired", "filtered", "evicted", "dead")
"""What may have become of a group that a consumer group needs no more."""

_TRANSIENT = frozenset({"bytes", "kept_bytes", "tickets", "restored", "part"})


class ChangedMeanwhileError(RedrbError):
    """The task became another one while it was read: begin again."""


@dataclass(frozen=True, slots=True)
class ConsumerGroup:
    """A consumer group of a saved task.

    Attributes:
        name: Its name.
        counters: Its counters when the save began.
        held: Groups that waited or were leased then.
        staleness: How stale the groups were that it took: "o<versions>" or "n<versions>" -> groups.
    """

    name: str
    counters: dict[str, int]
    held: int = 0
    staleness: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TaskHeader:
    """A task without its groups.

    Attributes:
        task: Its name.
        saved_ms: When the save began, in ms since 1970.
        settings: Its settings as Redis keeps them.
        counters: Its counters when the save began.
        groups: Its consumer groups.
        terms: How many strings its tags have had.
    """

    task: str
    saved_ms: int
    settings: dict[str, str]
    counters: dict[str, int]
    groups: tuple[ConsumerGroup, ...]
    terms: int

    @property
    def indexed(self) -> bool:
        """Whether the task keeps facts and pools."""
        return self.settings.get("indexed") == "1"

    @property
    def last(self) -> int:
        """Newest id."""
        return self.counters.get("last", 0)


class Need(NamedTuple):
    """A consumer group that is not done with a group.

    Attributes:
        place: Which one: its place in the header.
        moved: Status that it was moved to, or "".
        expiry: What it expired by, or "".
        failed: Failed deliveries.
        reads: How often it was taken and acknowledged.
    """

    place: int
    moved: str
    expiry: str
    failed: int
    reads: int


class GroupRecord(NamedTuple):
    """One stored group without its payload.

    Attributes:
        seq: Its id.
        facts: Its facts; None in a plain task.
        archived: When it became history, in ms since 1970; "" when it did not.
        needs: Which consumer groups are not done with it.
    """

    seq: int
    facts: Facts | None
    archived: str
    needs: tuple[Need, ...]


class DeadRecord(NamedTuple):
    """A dead letter: its id in Redis, and its fields in their order."""

    entry_id: str
    fields: tuple[tuple[bytes, bytes], ...]


class TaskReader:
    """Reads a task page by page.

    Attributes:
        header: The task without its groups, when the reading began.
        cursors: Where each consumer group was at the last page: beyond it everything waits.
    """

    def __init__(self, store: TaskStore, now_ms: int) -> None:
        """Look at a task.

        Raises:
            ConfigError: There is none.
        """
        self._store = store
        reply = self._run("task")
        if not reply:
            raise ConfigError(f"there is no task {store.task!r} at {store.client.where} to save.")
        fields, terms, newest, *groups = reply
        task = _texts(fields)
        self._newest_letter = newest.decode()
        self.header = TaskHeader(
            task=store.task,
            saved_ms=now_ms,
            settings=settings_of(task),
            counters={name: int(task[name]) for name in COUNTERS if name in task},
            groups=tuple(sorted(map(_consumer_group, groups), key=lambda group: group.name)),
            terms=int(terms),
        )
        self.cursors = [group.counters.get("cursor", 0) for group in self.header.groups]

    def groups(self) -> Iterator[tuple[GroupRecord, bytes]]:
        """Yield the groups that are stored, by arrival, with their payload.

        Raises:
            ChangedMeanwhileError: The task was cleared, or became an indexed one.
        """
        keys = self._store.keys
        after, count, end = 0, 1, f"{ID_BASE}{self.header.last}"
        while True:
            begin = f"{ID_BASE}{after + 1}"
            page = self._execute("XRANGE", keys.stream, begin, end, "COUNT", count)
            if not page:
                return
            entries = [(_seq(entry_id), fields) for entry_id, fields in page]
            records = self._records([seq for seq, _ in entries])
            for (_, fields), record in zip(entries, records, strict=True):
                if self._is_stored(record):
                    yield record, fields[1] if len(fields) == 2 and fields[0] == b"g" else b""
            after = entries[-1][0]
            count = _next_count(sum(map(len, fields)) for _, fields in page)

    def dead_letters(self) -> Iterator[DeadRecord]:
        """Yield the dead letters that were there when the reading began."""
        begin, count = "-", 1
        while self._newest_letter:
            page = self._execute(
                "XRANGE", self._store.keys.dead, begin, self._newest_letter, "COUNT", count
            )
            if not page:
                return
            for entry_id, flat in page:
                fields = tuple(zip(flat[::2], flat[1::2], strict=True))
                yield DeadRecord(entry_id.decode(), fields)
            begin = f"({page[-1][0].decode()}"
            count = _next_count(sum(map(len, fields)) for _, fields in page)

    def terms(self) -> Iterator[dict[str, str]]:
        """Yield the numbers of the strings that tags had when the reading began, in parts."""
        for part in self._scan(f"{self._store.keys.prefix}terms"):
            # younger ones may or may not be seen: their numbers will be given anew
            yield {
                name: number for name, number in part.items() if int(number) <= self.header.terms
            }

    def producers(self) -> Iterator[dict[str, str]]:
        """Yield the last operations of producers, in parts, where what they put is in here."""
        for part in self._scan(self._store.keys.producers):
            yield {k: v for k, v in part.items() if int(v.split()[1]) <= self.header.last}

    def _records(self, seqs: Sequence[int]) -> list[GroupRecord]:
        names = [group.name for group in self.header.groups]
        reply = self._run("entries", len(names), *names, *seqs)
        if not reply:
            raise ChangedMeanwhileError("the task was cleared")
        last, indexed, cursors, *told = reply
        if last < self.header.last or bool(indexed) != self.header.indexed:
            raise ChangedMeanwhileError("the task became another one")
        self.cursors = [min(cursor, self.header.last) for cursor in cursors]
        return [_record(seq, own) for seq, own in zip(seqs, told, strict=True)]

    def _is_stored(self, record: GroupRecord) -> bool:
        """Return whether somebody needs a group; others were deleted since it was read."""
        if self.header.indexed and not record.facts:
            return False
        return bool(record.needs or record.archived or not self.header.groups)

    def _scan(self, key: str) -> Iterator[dict[str, str]]:
        cursor = b"0"
        while True:
            cursor, flat = self._execute("HSCAN", key, cursor, "COUNT", 500)
            if flat:
                yield _texts(flat)
            if int(cursor) == 0:
                return

    def _execute(self, *arguments: Argument) -> Reply:
        return self._store.client.execute(*arguments)

    def _run(self, *arguments: Argument) -> Reply:
        return run(
            self._store.client, load("saving/snapshot"), [self._store.keys.stream], arguments
        )


def settings_of(task: Mapping[str, str]) -> dict[str, str]:
    """Return the settings among the fields of a task."""
    others = _TRANSIENT.union(COUNTERS)
    return {name: value for name, value in task.items() if name not in others}


def ledger_of(group: ConsumerGroup, waiting: int, *, last: int, cursor: int) -> dict[str, int]:
    """Return the counters of a consumer group of which `waiting` groups were saved.

    Groups that ended while the task was saved are in neither; for a rate they count as taken.
    """
    own = dict(group.counters)
    if "taken" in own:
        own["taken"] = max(own["taken"] + group.held - waiting - _leased(group), 0)
    own["waiting"] = waiting
    own["cursor"] = min(cursor, last)
    own["put"] = waiting + sum(own.get(name, 0) for name in ENDED)
    return own


def _leased(group: ConsumerGroup) -> int:
    return max(group.held - group.counters.get("waiting", 0), 0)


def _next_count(sizes: Iterator[int]) -> int:
    """Return how many entries the next page may have, if they are as large as those of this one."""
    return max(1, min(PAGE_GROUPS, PAGE_BYTES // max(*sizes, 1)))


def _consumer_group(told: Sequence[Any]) -> ConsumerGroup:
    name, state, leased, staleness = told
    counters = {field: int(value) for field, value in _texts(state).items()}
    return ConsumerGroup(
        name=name.decode(),
        counters=counters,
        held=counters.get("waiting", 0) + int(leased),
        staleness={mark: int(groups) for mark, groups in _texts(staleness).items()},
    )


def _record(seq: int, told: Sequence[Any]) -> GroupRecord:
    facts, archived, *flat = told
    needs = zip(*(flat[place::5] for place in range(5)), strict=True)
    return GroupRecord(
        seq,
        _saved_facts(facts) if facts else None,
        archived.decode(),
        tuple(
            Need(int(place), moved.decode(), expiry.decode(), int(failed), int(reads))
            for place, moved, expiry, failed, reads in needs
        ),
    )


def _saved_facts(packed: bytes) -> Facts:
    facts = unpack_facts(packed)
    facts.pop("current", None)  # of a run that is over
    return facts


def _texts(flat: Sequence[bytes]) -> dict[str, str]:
    return {
        name.decode(): value.decode() for name, value in zip(flat[::2], flat[1::2], strict=True)
    }


def _seq(entry_id: bytes) -> int:
    return int(entry_id.rpartition(b"-")[2])
