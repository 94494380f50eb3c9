"""Reads tasks: one script of bounded work for each partition, sent together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from redis.exceptions import NoPermissionError

from redrb.connection import Client
from redrb.connection.failures import is_missing_script
from redrb.connection.transport import Pipeline, Reply, first_error
from redrb.keys import is_name
from redrb.lua.scripts import add_to, load
from redrb.state.histogram import Histogram
from redrb.state.model import ConsumerGroupState, Staleness, TaskState, WorkerState
from redrb.state.workers import worker_state
from redrb.stream.task.ledger import StreamStats
from redrb.stream.task.settings import STORED_NAMES
from redrb.stream.task.store import TaskStore

SCRIPT = "task/observe"

_HIDDEN = ("sampled", "order", "partitions")
_MOST_PARTITIONS = 1024


@dataclass(frozen=True, slots=True)
class _Part:
    """What one partition of a task says."""

    fields: Mapping[str, str]
    put: int
    groups: Mapping[str, ConsumerGroupState]
    workers: tuple[WorkerState, ...]
    workers_total: int


def read_tasks(
    client: Client, namespace: str, names: Iterable[str], *, group: str
) -> list[TaskState]:
    """Return the states of tasks; names without a task are left out.

    Args:
        client: A client.
        namespace: Namespace of the tasks.
        names: Their names.
        group: Consumer group that comes first, also if it has not joined.
    """
    named = [name for name in names if is_name(name)]
    stores = [TaskStore.of(client, namespace, name) for name in named]
    first = dict(zip(named, _observed(stores, group), strict=True))
    rest = {
        name: TaskStore.of_partitions(client, namespace, name, count)[1:]
        for name, part in first.items()
        if part is not None and (count := _partitions(part)) > 1
    }
    further = iter(_observed([store for stores in rest.values() for store in stores], group))
    states = []
    for name, part in first.items():
        parts = [part, *(next(further) for _ in rest.get(name, ()))]
        if part is None:
            states.append(TaskState(name, readable=False))
        elif part.fields:
            states.append(_task(name, [each for each in parts if each is not None]))
    return states


def _observed(stores: Sequence[TaskStore], group: str) -> list[_Part | None]:
    """Run the script on tasks: those that the same client reaches in one pipeline; None: denied."""
    found: dict[int, _Part | None] = {}
    by_client: dict[int, list[int]] = {}
    for number, store in enumerate(stores):
        by_client.setdefault(id(store.client), []).append(number)
    for numbers in by_client.values():
        replies = _replies([stores[number] for number in numbers], group)
        for number, reply in zip(numbers, replies, strict=True):
            found[number] = None if isinstance(reply, NoPermissionError) else _part(reply)
    return [found[number] for number in range(len(stores))]


def _replies(stores: Sequence[TaskStore], group: str) -> list[Reply]:
    client = stores[0].client

    def send(some: Sequence[TaskStore], *, whole: bool) -> list[Reply]:
        pipeline = Pipeline()
        for store in some:
            add_to(pipeline, load(SCRIPT), store.script_keys, [group], whole=whole)
        return client.exchange(pipeline)

    def attempt() -> list[Reply]:
        replies = send(stores, whole=False)
        missing = [at for at, reply in enumerate(replies) if is_missing_script(reply)]
        if missing:
            for at, reply in zip(
                missing, send([stores[at] for at in missing], whole=True), strict=True
            ):
                replies[at] = reply
        error = first_error([each for each in replies if not isinstance(each, NoPermissionError)])
        if error is not None:
            raise error
        return replies

    return client.retrying(attempt)


def _part(reply: Reply) -> _Part:
    if not reply:
        return _Part({}, 0, {}, (), 0)
    settings, put, server_ms, groups, total, workers = reply
    fields = {name.decode(): value.decode(errors="replace") for name, value in _pairs(settings)}
    now_ms = float(server_ms)
    read = (
        worker_state(name.decode(errors="replace"), (now_ms - float(seen)) / 1000, packed)
        for name, seen, packed in workers
    )
    return _Part(
        fields=fields,
        put=int(put),
        groups={group.name: group for group in map(_group, groups)},
        workers=tuple(worker for worker in read if worker is not None),
        workers_total=int(total),
    )


def _group(reply: Reply) -> ConsumerGroupState:
    name, figures, waiting, leased, taken = reply
    counters = {key.decode(errors="replace"): int(value) for key, value in _pairs(figures)}
    ages = {
        int(field[1:]): int(groups)
        for field, groups in _pairs(taken)
        if field[:1] == b"o" and field[1:].isdigit()
    }
    return ConsumerGroupState(
        name.decode(errors="replace"),
        StreamStats.of(counters),
        Staleness(_histogram(waiting), _histogram(leased), Histogram.of(ages)),
    )


def _histogram(reply: Reply) -> Histogram:
    sampled, unknown, *counts = map(int, reply)
    return Histogram.of(dict(_pairs(counts)), unknown=unknown, sampled=bool(sampled))


def _pairs(flat: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _partitions(part: _Part) -> int:
    count = part.fields.get("partitions") or "1"
    return min(int(count), _MOST_PARTITIONS) if count.isdecimal() else 1


def _task(name: str, parts: Sequence[_Part]) -> TaskState:
    """Return a task from its partitions."""
    first = parts[0]
    put = sum(part.put for part in parts)
    groups = tuple(
        _summed([part.groups[each] for part in parts if each in part.groups])
        for each in first.groups
    )
    stored = groups[0].stats if groups else StreamStats.of({})
    return TaskState(
        name=name,
        incarnation=first.fields.get("incarnation", ""),
        order=first.fields.get("order") or "fifo",
        partitions=_partitions(first),
        settings={
            key: value
            for key in STORED_NAMES
            if (value := first.fields.get(key)) and key not in _HIDDEN
        },
        groups=groups,
        workers=_merged([part.workers for part in parts]),
        workers_total=max(part.workers_total for part in parts),
        stored_bytes=round(stored.bytes_put / put * stored.stored) if put else 0,
    )


def _summed(parts: Sequence[ConsumerGroupState]) -> ConsumerGroupState:
    if len(parts) == 1:
        return parts[0]
    of = [part.staleness for part in parts]
    return ConsumerGroupState(
        parts[0].name,
        StreamStats.summed([part.stats for part in parts]),
        Staleness(
            Histogram.summed([one.waiting for one in of]),
            Histogram.summed([one.leased for one in of]),
            Histogram.summed([one.taken for one in of]),
        ),
    )


def _merged(parts: Sequence[tuple[WorkerState, ...]]) -> tuple[WorkerState, ...]:
    """Return each process once: it announces itself in each partition that it works on."""
    if len(parts) == 1:
        return parts[0]
    merged: dict[tuple[str, int, str, str], WorkerState] = {}
    for worker in sorted((each for part in parts for each in part), key=lambda one: one.seen_s):
        process = (worker.host, worker.pid, worker.role, worker.label)
        newest = merged.get(process, worker)
        merged[process] = (
            newest
            if newest is worker
            else replace(
                newest,
                groups=newest.groups + worker.groups,
                samples=newest.samples + worker.samples,
                leased=newest.leased + worker.leased,
            )
        )
    return tuple(merged.values())
