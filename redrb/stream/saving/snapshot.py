"""`TaskReader`: reads a whole task, page by page, while makers and trainers go on.

A snapshot holds every group that was stored from its beginning to its end, once, with the counters
of its beginning. A page's payloads are read before its records: a group that is deleted in between
has no record, and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from redrb.connection.client import scan_hash
from redrb.connection.transport import Argument, Reply
from redrb.errors import ConfigError, RedrbError
from redrb.stream.saving.calls import ReadRecords, ReadTask, TaskReply
from redrb.stream.saving.records import (
    COUNTERS,
    PUT_FIELDS,
    ConsumerGroup,
    DeadRecord,
    GroupRecord,
    Need,
    SourceRecord,
    TaskHeader,
    settings_of,
)
from redrb.stream.task.entries import SavedFacts, entry_id, parse_entry, unpack_facts
from redrb.stream.task.store import TaskStore
from redrb.unpacking import Reading, whole

PAGE_GROUPS = 32
"""Most groups that are read, or restored, in one step."""

PAGE_BYTES = 4 << 20
"""Bytes of a page to aim at; a single group may be larger."""


class TaskChanged(RedrbError):
    """The task was cleared while it was read: begin again."""


class TaskReader:
    """Reads a task page by page."""

    def __init__(self, store: TaskStore, now_ms: int) -> None:
        """Read the header of a task; raises ConfigError if there is no such task."""
        self._store = store
        reply = store.call(ReadTask())
        if not reply.exists:
            raise ConfigError(f"there is no task {store.task!r} at {store.client.where} to save.")
        with Reading(f"task {store.task!r}"):
            self.header = _header(store.task, now_ms, reply)
        self._newest_letter = reply.newest_letter

    def groups(self) -> Iterator[tuple[GroupRecord, bytes]]:
        """Yield the stored groups with their payloads, by arrival; raises TaskChanged."""
        stream, end = self._store.keys.stream, entry_id(self.header.last)
        names = [group.name for group in self.header.groups]
        after, count = 0, 1
        while True:
            page = self._execute("XRANGE", stream, entry_id(after + 1), end, "COUNT", count)
            if not page:
                return
            entries = list(map(parse_entry, page))
            read = ReadRecords(names, [str(seq) for seq, _ in entries])
            reply, facts = read.run_with_bytes(self._store.client, self._store.script_keys)
            if reply.last < self.header.last:
                raise TaskChanged("the task was cleared")
            records = map(_record, [seq for seq, _ in entries], reply.needs, facts)
            for (_, payload), record in zip(entries, records, strict=True):
                # it may have been deleted after it was read
                if record is not None and (record.needs or not self.header.groups):
                    yield record, payload or b""
            after = entries[-1][0]
            count = _next_count(sum(map(len, fields or ())) for _, fields in page)

    def dead_letters(self) -> Iterator[DeadRecord]:
        """Yield the dead letters that were there when the reading began."""
        begin, count = "-", 1
        while self._newest_letter:
            page = self._execute(
                "XRANGE", self._store.keys.dead, begin, self._newest_letter, "COUNT", count
            )
            if not page:
                return
            for letter_id, flat in page:
                fields = tuple(zip(flat[::2], flat[1::2], strict=True))
                yield DeadRecord(letter_id.decode(), fields)
            begin = f"({page[-1][0].decode()}"
            count = _next_count(sum(map(len, fields)) for _, fields in page)

    def producers(self) -> Iterator[dict[str, str]]:
        """Yield, in parts, the last operations of producers whose groups are in the snapshot."""
        for part in self._scan(self._store.keys.puts):
            records = {
                name: record.split() for name, record in part.items() if name not in PUT_FIELDS
            }
            with Reading("the record of a producer"):
                kept = {  # without the epoch: a restored task counts anew
                    name: " ".join(record[:3])
                    for name, record in records.items()
                    if int(record[1]) <= self.header.last
                }
            if kept:
                yield kept

    def sources(self) -> Iterator[SourceRecord]:
        """Yield, in parts, the records of forwarded groups, but for those put after the beginning.

        The row of an origin is read before its records, so none is removed that it does not name.
        """
        prefix = self._store.keys.prefix
        for rows in self._scan(f"{prefix}sources"):
            for origin, row in rows.items():
                yield SourceRecord(origin, row, {})
                for part in self._scan(f"{prefix}sources:{origin}"):
                    with Reading("the record of a forwarded group"):
                        records = {
                            seq: record
                            for seq, record in part.items()
                            if int(record.split()[0]) <= self.header.last
                        }
                    yield SourceRecord(origin, row, records)

    def refreshes(self) -> Iterator[dict[str, str]]:
        """Yield the last refreshes of a `ReplayBuffer`'s task, by status."""
        for marks in self._scan(self._store.keys.refreshed):
            with Reading("the refresh of a task"):
                pairs = {status: map(int, mark.split()) for status, mark in marks.items()}
                # later ids are given to other groups
                yield {
                    status: f"{train_step} {min(last, self.header.last)}"
                    for status, (train_step, last) in pairs.items()
                }

    def _scan(self, key: str) -> Iterator[dict[str, str]]:
        for page in filter(None, scan_hash(self._store.client, key)):
            with Reading("a hash of a task"):
                yield {name.decode(): value.decode() for name, value in page}

    def _execute(self, *arguments: Argument) -> Reply:
        return self._store.client.execute(*arguments)


def _next_count(sizes: Iterator[int]) -> int:
    """Return the number of entries of the next page, if they are as large as those of this one."""
    return max(1, min(PAGE_GROUPS, PAGE_BYTES // max(*sizes, 1)))


def _header(task: str, now_ms: int, reply: TaskReply) -> TaskHeader:
    groups = [
        ConsumerGroup(
            each.name,
            each.counters,
            each.counters.get("waiting", 0) + each.leased,
            each.staleness,
        )
        for each in sorted(reply.groups, key=lambda group: group.name)
    ]
    return TaskHeader(
        task=task,
        saved_ms=now_ms,
        settings=settings_of(reply.fields),
        counters={name: whole(reply.fields[name]) for name in COUNTERS if name in reply.fields},
        groups=tuple(groups),
    )


@Reading("the record of a group")
def _record(seq: int, needs: tuple[Need, ...], packed: bytes) -> GroupRecord | None:
    """Return the record of a group; None when the group was deleted meanwhile."""
    if not packed:
        return None
    facts = unpack_facts(packed)
    facts.pop("current", None)  # the version when it was put: of a run that is over
    return GroupRecord(seq, cast("SavedFacts", facts), needs)
