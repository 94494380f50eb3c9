"""Stored groups are read by id or by time, and their place or status is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from redrb.codec import decode_items, parse_group
from redrb.connection.transport import Pipeline
from redrb.errors import ConfigError
from redrb.experience import BufferItem, Status
from redrb.stream.orders import ByAdmission, Fifo, GroupFacts, Lifo, Order, Score, checked_score
from redrb.stream.task.calls import Archived, Move, Rescore, Settle, Settled, Trim
from redrb.stream.task.entries import (
    Facts,
    entry_id,
    member_of,
    parse_entry,
    texts_of,
    unpack_facts,
)
from redrb.stream.task.store import TaskStore
from redrb.stream.task.task import Task
from redrb.unpacking import Reading

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


GROUPS_OF_A_CALL = 100
"""Most groups that one script call changes."""


def move(store: TaskStore, group: str, status: Status, ids: Sequence[int]) -> int:
    """Move waiting groups, each atomically, to another status; returns how many wait there now."""
    return sum(
        page.found
        for seqs in texts_of(ids, GROUPS_OF_A_CALL)
        for page in store.pages(Move(group, status, seqs))
    )


def settle(store: TaskStore, group: str, trained: Mapping[int, int], incarnation: str) -> Settled:
    """Acknowledge groups, leased or waiting, by id and number of their samples."""
    acknowledged = refused = 0
    pairs = [(str(seq), samples) for seq, samples in trained.items()]
    for start in range(0, len(pairs), GROUPS_OF_A_CALL):
        part = pairs[start : start + GROUPS_OF_A_CALL]
        settled = store.call(Settle(group, incarnation, part))
        acknowledged += settled.acknowledged
        refused += settled.refused
    return Settled(acknowledged, refused)


def update_priorities(task: Task, wanted: Sequence[tuple[int, float]]) -> int:
    """Change priorities, which the task must keep; returns how many groups are stored."""
    ids, priorities = [seq for seq, _ in wanted], [priority for _, priority in wanted]
    if _order_of(task) is None:
        task.reopen()  # another process may have given it an order
    found = _update(task, ids, priorities)
    if found is None:
        task.reopen()
        found = _update(task, ids, priorities)
    return found or 0


def _order_of(task: Task) -> Order | None:
    order = task.description.order
    return None if isinstance(order, Fifo | Lifo | ByAdmission) else order


def _update(task: Task, ids: Sequence[int], priorities: Sequence[float]) -> int | None:
    """Change priorities; None when the task was deleted or has another order by now."""
    order = _order_of(task)
    if order is None:
        raise ConfigError(
            'this task keeps no priorities: open it with order="priority" or "prioritized", or '
            "give the task's Order object."
        )
    found = 0
    for start in range(0, len(ids), GROUPS_OF_A_CALL):
        part = slice(start, start + GROUPS_OF_A_CALL)
        changes = _scored(task.store, order, ids[part], priorities[part])
        changed = task.store.call(Rescore(order.name, changes))
        if changed is None:
            return None
        found += changed
    return found


def _scored(
    store: TaskStore, order: Order, ids: Sequence[int], priorities: Sequence[float]
) -> list[tuple[str, float, Score]]:
    """Return id, priority and score of those of the groups that are stored."""
    changes: list[tuple[str, float, Score]] = []
    for seq, priority, facts in zip(ids, priorities, _facts(store, ids), strict=True):
        if facts is None:
            continue
        seen = GroupFacts(
            policy_version=facts.get("version"),
            priority=priority,
            samples=facts["samples"],
            nbytes=facts["size"],
            status=Status(facts["status"]),
        )
        score = checked_score(order, seen)
        if isinstance(score, str):
            raise ConfigError(f"order {order.name!r} does not go by priority.")
        changes.append((str(seq), priority, score))
    return changes


def _facts(store: TaskStore, ids: Sequence[int]) -> list[Facts | None]:
    found = store.client.execute("HMGET", f"{store.keys.prefix}facts", *map(member_of, ids))
    return [packed and unpack_facts(packed) for packed in found]
