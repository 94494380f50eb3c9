"""`TaskReader`: reads a whole task, page by page, while makers and trainers go on.

A snapshot holds every group that was stored from its beginning to its end, once. A page's payloads
are read before its records: a group that is deleted in between has no record, and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from redrb.connection.client import scan_hash
from redrb.connection.transport import Argument, Reply, without_errors
from redrb.errors import ConfigError, RedrbError
from redrb.stream.saving.calls import ReadRecords
from redrb.stream.saving.records import (
    SAVED,
    SAVED_FIELDS,
    DeadRecord,
    GroupRecord,
    Need,
    Refreshes,
    SourceRecord,
    TaskHeader,
)
from redrb.stream.task.entries import SavedFacts, entry_id, parse_entries, unpack_facts
from redrb.stream.task.store import TaskStore
from redrb.unpacking import Reading

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
        keys = store.keys
        look = store.client.transaction(keys.none)
        look.add("HGETALL", keys.task)
        look.add("HGET", keys.puts, "last")
        look.add("SMEMBERS", keys.groups)
        look.add("XREVRANGE", keys.dead, "+", "-", "COUNT", 1)
        look.add("EXEC")
        flat, last, groups, newest = without_errors(store.exchange(look)[-1])[-4:]
        if not flat:
            raise ConfigError(f"there is no task {store.task!r} at {store.client.where} to save.")
        with Reading(f"task {store.task!r}"):
            fields = dict(zip((name.decode() for name in flat[::2]), flat[1::2], strict=True))
            self.header = TaskHeader(
                task=store.task,
                saved_ms=now_ms,
                settings={n: v.decode() for n, v in fields.items() if n in SAVED_FIELDS},
                last=int(last),
                version=int(fields.get("version", 0)),
                groups=tuple(sorted(name.decode() for name in groups)),
            )
            self._newest_letter = newest[0][0].decode() if newest else ""

    def groups(self) -> Iterator[tuple[GroupRecord, bytes]]:
        """Yield the stored groups with their payloads, by arrival; raises TaskChanged."""
        stream, end = self._store.keys.stream, entry_id(self.header.last)
        after, count = 0, 1
        while True:
            page = self._execute("XRANGE", stream, entry_id(after + 1), end, "COUNT", count)
            if not page:
                return
            entries, _ = parse_entries(page)
            read = ReadRecords(list(self.header.groups), [str(seq) for seq, _ in entries])
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

    def sources(self) -> Iterator[SourceRecord]:
        """Yield, in parts, the records of forwarded groups, but for those put after the beginning.

        The row of an origin is read before its records, so none is removed that it does not name.
        """
        prefix = self._store.keys.prefix
        for rows in self._scan(f"{prefix}sources"):
            for origin, row in rows.items():
                if origin == SAVED:
                    continue
                yield SourceRecord(origin, row, {})
                for part in self._scan(f"{prefix}sources:{origin}"):
                    with Reading("the record of a forwarded group"):
                        records = {seq: record.split() for seq, record in part.items()}
                        digests = {
                            seq: digest
                            for seq, (here, digest) in records.items()
                            if int(here) <= self.header.last
                        }
                    yield SourceRecord(origin, row, digests)

    def refreshes(self) -> Iterator[Refreshes]:
        """Yield the last refreshes of a `ReplayBuffer`'s task, by status."""
        for marks in self._scan(self._store.keys.refreshed):
            with Reading("the refresh of a task"):
                pairs = {status: map(int, mark.split()) for status, mark in marks.items()}
                # later ids are given to other groups
                yield {
                    status: (train_step, min(last, self.header.last))
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


@Reading("the record of a group")
def _record(seq: int, needs: tuple[Need, ...], packed: bytes) -> GroupRecord | None:
    """Return the record of a group; None when the group was deleted meanwhile."""
    if not packed:
        return None
    facts = unpack_facts(packed)
    facts.pop("current", None)  # the version when it was put: of a run that is over
    return GroupRecord(seq, cast("SavedFacts", facts), needs)
