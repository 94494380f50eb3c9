"""Stored groups are read by id, and their place or status is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redrb.codec import decode_items, parse_group
from redrb.connection.transport import Pipeline
from redrb.errors import ConfigError
from redrb.experience import BufferItem, Status
from redrb.stream.orders import ByAdmission, Fifo, GroupFacts, Lifo, Order, Score, checked_score
from redrb.stream.task.calls import Move, Rescore, Settle, Settled
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

PAGE_GROUPS = 64
"""Groups that are read with one request."""


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group that was read without taking it.

    Attributes:
        id: Its id in the task.
        items: Its samples.
        incarnation: Incarnation of the task in which it has this id.
    """

    id: int
    items: list[BufferItem]
    incarnation: str


def read_groups(task: Task, ids: Sequence[int]) -> list[StoredGroup | None]:
    """Return groups by id, in the order of `ids`; None for a group that is gone."""
    found: list[StoredGroup | None] = []
    for start in range(0, len(ids), PAGE_GROUPS):
        found += _read(task.store, ids[start : start + PAGE_GROUPS])
    return found


def _read(store: TaskStore, ids: Sequence[int]) -> list[StoredGroup | None]:
    """Return groups by id; None where there is none."""
    pipeline = Pipeline()
    pipeline.add("HGET", store.keys.task, "incarnation")
    for seq in ids:
        pipeline.add("XRANGE", store.keys.stream, entry_id(seq), entry_id(seq))
    pipeline.add("HGET", store.keys.task, "incarnation")
    # read between two looks at the incarnation: if it has changed, read again
    while True:
        before, *replies, incarnation = store.exchange(pipeline)
        if before == incarnation:
            break
    name = "" if incarnation is None else incarnation.decode(errors="replace")
    payloads = [parse_entry(entries[0])[1] if entries else None for entries in replies]
    return [
        None if payload is None else StoredGroup(seq, decode_items(parse_group(payload)), name)
        for seq, payload in zip(ids, payloads, strict=True)
    ]


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
