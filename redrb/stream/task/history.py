"""`read_groups`, `history`: stored groups are read by id or by time, without a lease."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from redrb.codec import decode_items, parse_group
from redrb.connection.transport import Pipeline
from redrb.damage import Reading
from redrb.experience import BufferItem
from redrb.stream.task.calls import Archived, Trim
from redrb.stream.task.entries import entry_id, member_of, parse_entry
from redrb.stream.task.store import TaskStore
from redrb.stream.task.task import Task

PAGE_GROUPS = 64
"""Groups that are read with one request."""


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group that was read without taking it.

    Attributes:
        id: Its id in the task.
        items: Its samples.
        archived_at: When the last consumer group acknowledged it, in UTC; None while a consumer
            group still needs it.
        incarnation: Incarnation of the task in which it has this id.
    """

    id: int
    items: list[BufferItem]
    archived_at: datetime | None
    incarnation: str


def read_groups(task: Task, ids: Sequence[int]) -> list[StoredGroup | None]:
    """Return groups by id, in the order of `ids`; None for a group that is gone."""
    _trim(task.store)
    found: list[StoredGroup | None] = []
    for start in range(0, len(ids), PAGE_GROUPS):
        found += _read(task.store, ids[start : start + PAGE_GROUPS])
    return found


def history(task: Task, since: datetime | None, until: datetime | None) -> Iterator[StoredGroup]:
    """Yield acknowledged groups that are kept, in the order in which they were acknowledged."""
    after = ("-inf", "") if since is None else (f"{since.timestamp() * 1000:.0f}", "")
    end = "+inf" if until is None else f"({until.timestamp() * 1000:.0f}"
    while True:
        _trim(task.store)
        page = task.store.call(Archived(*after, end, PAGE_GROUPS))
        if not page:
            return
        for group in _read(task.store, [seq for seq, _ in page]):
            if group is not None:
                yield group
        after = (page[-1][1], member_of(page[-1][0]))


def _trim(store: TaskStore) -> None:
    """Delete history beyond the period and the number that the task keeps."""
    for _ in store.pages(Trim()):
        pass


def _read(store: TaskStore, ids: Sequence[int]) -> list[StoredGroup | None]:
    """Return groups by id; None where there is none."""
    pipeline = Pipeline()
    pipeline.add("HGET", store.keys.task, "incarnation")
    for seq in ids:
        pipeline.add("XRANGE", store.keys.stream, entry_id(seq), entry_id(seq))
        pipeline.add("ZSCORE", f"{store.keys.prefix}archive", member_of(seq))
    pipeline.add("HGET", store.keys.task, "incarnation")
    # read between two looks at the incarnation: if it has changed, read again
    while True:
        before, *replies, incarnation = store.exchange(pipeline)
        if before == incarnation:
            break
    name = "" if incarnation is None else incarnation.decode(errors="replace")
    return [
        _group(seq, parse_entry(entries[0])[1], score, name) if entries else None
        for seq, entries, score in zip(ids, replies[::2], replies[1::2], strict=True)
    ]


def _group(
    seq: int, payload: bytes | None, at_ms: bytes | None, incarnation: str
) -> StoredGroup | None:
    if payload is None:
        return None
    with Reading(f"the time at which group {seq} was acknowledged"):
        at = None if at_ms is None else datetime.fromtimestamp(int(float(at_ms)) / 1000, UTC)
    return StoredGroup(seq, decode_items(parse_group(payload)), at, incarnation)
