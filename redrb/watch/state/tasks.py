"""Reads tasks: one script of bounded work for each partition, sent together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from redis.exceptions import ResponseError

from redrb.connection import Client
from redrb.connection.failures import is_missing_script, is_transient, translate
from redrb.connection.transport import Pipeline, Reply
from redrb.errors import RedrbError, StoreDenied, StoreError
from redrb.keys import is_task
from redrb.registry import ODD_NAME
from redrb.stream.task.ledger import AdmissionStats, StreamStats
from redrb.stream.task.settings import STORED_NAMES
from redrb.stream.task.store import TaskStore
from redrb.stream.task.stored_settings import shown_settings, summed_settings
from redrb.unpacking import Reading
from redrb.watch.state.calls import Observe, Observed, ObservedGroup
from redrb.watch.state.histogram import Histogram
from redrb.watch.state.model import ConsumerGroupState, Staleness, TaskState, WorkerState
from redrb.watch.state.workers import Announced, in_order, shown_of, worker_state


def with_holdings(
    workers: Sequence[WorkerState], groups: Sequence[ConsumerGroupState]
) -> tuple[WorkerState, ...]:
    """Return the workers; those that are dead or have ended with what the task says they hold.

    Rights are counted by process. Leases are not counted by consumer: a dead worker holds at most
    those that the task counts, and none where another one that takes is live, as its heartbeats
    take them over.
    """
    takes = any(each.life == "live" and each.role != "maker" for each in workers)
    living = sum(each.leased for each in workers if each.alive)
    counted = sum(group.stats.ledger.leased for group in groups)
    leased = 0 if takes else max(0, counted - living)
    rights = (groups[0].stats.admission if groups else None) or AdmissionStats()
    unlisted = max(0, rights.held - sum(rights.makers.values()))

    def held(worker: WorkerState) -> WorkerState:
        process = worker.name.rpartition("-")[0] + "-"  # its name as a maker begins so, too
        found = sum(count for name, count in rights.makers.items() if name.startswith(process))
        return replace(
            worker,
            leased=min(worker.leased, leased),
            rights=min(worker.rights, found + unlisted),
        )

    return tuple(worker if worker.alive else held(worker) for worker in workers)


_FIELDS = (*STORED_NAMES, "incarnation")
_HIDDEN = ("order", "partitions")
_MOST_PARTITIONS = 1024


@dataclass(frozen=True, slots=True)
class _ObservedPartition:
    """What one partition of a task says, and what follows from it."""

    found: Observed
    groups: Mapping[str, ConsumerGroupState]
    workers: tuple[WorkerState, ...]


def read_tasks(
    client: Client, namespace: str, names: Iterable[str], group: str, known: dict[str, Announced]
) -> list[TaskState]:
    """Return the states of tasks; names without a task are left out.

    `group` is that of `StateReader`. `known` has what earlier looks have read of workers, by prefix
    of the partition's keys; this look adds to it.
    """
    listed = list(names)
    named = list(filter(is_task, listed))
    stores = [TaskStore.of(client, namespace, name) for name in named]
    first = dict(zip(named, _observed(stores, group, known), strict=True))
    rest = {
        name: TaskStore.of_partitions(client, namespace, name, count)[1:]
        for name, part in first.items()
        if isinstance(part, _ObservedPartition) and (count := _partitions(part)) > 1
    }
    others = [store for each in rest.values() for store in each]
    further = iter(_observed(others, group, known))
    for prefix in known.keys() - {store.keys.prefix for store in (*stores, *others)}:
        del known[prefix]
    states = [
        TaskState(name, readable=False, damage=ODD_NAME) for name in listed if not is_task(name)
    ]
    for name, part in first.items():
        parts = [part, *(next(further) for _ in rest.get(name, ()))]
        readable = [each for each in parts if isinstance(each, _ObservedPartition)]
        damage = [
            str(each) for each in parts if not isinstance(each, _ObservedPartition | StoreDenied)
        ]
        if damage or not isinstance(part, _ObservedPartition):
            states.append(TaskState(name, readable=False, damage="".join(damage[:1])))
        elif part.found.settings:
            try:
                states.append(_task(name, readable))
            except StoreError as error:
                states.append(TaskState(name, readable=False, damage=str(error)))
    return states


def _observed(
    stores: Sequence[TaskStore], group: str, announced: dict[str, Announced]
) -> list[_ObservedPartition | RedrbError]:
    """Run the script on tasks.

    An error takes the place of a task that the user may not read, or whose data is damaged.
    """
    known = [announced.setdefault(store.keys.prefix, Announced()) for store in stores]
    asked = [Observe(group, workers.since, _FIELDS) for workers in known]

    def add(pipeline: Pipeline, number: int, *, whole: bool) -> None:
        asked[number].add_to(pipeline, stores[number].script_keys, whole=whole)

    found: list[_ObservedPartition | RedrbError] = []
    replies = exchanged([store.client for store in stores], add)
    for store, call, workers, (reply,) in zip(stores, asked, known, replies, strict=True):
        try:
            if isinstance(reply, ResponseError):
                found.append(translate(reply, store.client.where))
                continue
            with Reading(f"task {store.task!r}"):
                found.append(_part(call.read(reply), workers))
        except RedrbError as error:
            found.append(error)
    return found


def _part(found: Observed, announced: Announced) -> _ObservedPartition:
    read = (worker_state(*worker) for worker in announced.note(found))
    return _ObservedPartition(
        found,
        groups={group.name: _group(group, found) for group in found.groups},
        workers=tuple(worker for worker in read if worker is not None),
    )


def _group(group: ObservedGroup, found: Observed) -> ConsumerGroupState:
    return ConsumerGroupState(
        group.name,
        StreamStats.of({**found.figures, **group.figures}),
        Staleness(
            group.waiting.histogram(found.version),
            group.leased.histogram(found.version),
            Histogram.of(dict(group.taken)),
        ),
    )


def _partitions(part: _ObservedPartition) -> int:
    count = part.found.settings.get("partitions") or "1"
    return min(int(count), _MOST_PARTITIONS) if count.isdecimal() else 1


def _task(name: str, parts: Sequence[_ObservedPartition]) -> TaskState:
    """Return a task from its partitions; raises StoreError if its settings are damaged."""
    first = parts[0]
    shown = summed_settings([shown_settings(part.found.settings) for part in parts])
    put = sum(part.found.put for part in parts)
    names = sorted({name for part in parts for name in part.groups} - first.groups.keys())
    groups = tuple(
        _summed([_group_in(part, name) for part in parts]) for name in (*first.groups, *names)
    )
    stored = groups[0].stats if groups else StreamStats.of({})
    announced = _merged([part.workers for part in parts])
    workers = shown_of(announced)
    memory = [part.found.memory_bytes for part in parts]
    return TaskState(
        name=name,
        incarnation=first.found.settings.get("incarnation", ""),
        order=first.found.settings.get("order") or "fifo",
        partitions=_partitions(first),
        settings={name: text for name, text in shown.items() if name not in _HIDDEN},
        groups=groups,
        odd_groups=max(part.found.odd_groups for part in parts),
        workers=with_holdings(in_order(workers), groups),
        workers_total=max(part.found.workers_total for part in parts)
        - len(announced)
        + len(workers),
        stored_bytes=round(stored.bytes_put / put * stored.stored) if put else 0,
        memory_bytes=None if None in memory else sum(filter(None, memory)),
    )


def _group_in(part: _ObservedPartition, name: str) -> ConsumerGroupState:
    """Return a consumer group in one partition; where it has not joined, what it would find."""
    if name in part.groups:
        return part.groups[name]
    stored = part.found.figures["stored"]
    found = StreamStats.of({**part.found.figures, "put": stored, "waiting": stored})
    return ConsumerGroupState(name, found, Staleness(Histogram(unknown=stored)))


def _summed(parts: Sequence[ConsumerGroupState]) -> ConsumerGroupState:
    if len(parts) == 1:
        return parts[0]
    staleness = [
        Histogram.summed([getattr(part.staleness, name) for part in parts])
        for name in ("waiting", "leased", "taken")
    ]
    stats = StreamStats.summed([part.stats for part in parts])
    return ConsumerGroupState(parts[0].name, stats, Staleness(*staleness))


def _merged(parts: Sequence[tuple[WorkerState, ...]]) -> tuple[WorkerState, ...]:
    """Return each process once: it announces itself in each partition that it works on."""
    if len(parts) == 1:
        return parts[0]
    merged: dict[tuple[str, int, str, str], WorkerState] = {}
    for worker in sorted((each for part in parts for each in part), key=lambda one: one.seen_s):
        process = (worker.host, worker.pid, worker.role, worker.label)
        newest = merged.setdefault(process, worker)
        if newest is not worker:
            names = ("groups", "samples", "leased")
            sums = {name: getattr(newest, name) + getattr(worker, name) for name in names}
            merged[process] = replace(newest, **sums)
    return tuple(merged.values())


_MOST_SENT: Final = 200
"""Most tasks or weights whose requests are sent together."""


class Add(Protocol):
    """Adds the commands about one of the things to a pipeline."""

    def __call__(self, pipeline: Pipeline, number: int, *, whole: bool) -> None:
        """Add them; `whole`: a script with its text."""


def exchanged(clients: Sequence[Client], add: Add) -> list[list[Reply]]:
    """Return the replies about each of several things, each of which a client reaches.

    An error that concerns one thing alone, and comes again, takes the place of its reply.
    """
    found: dict[int, list[Reply]] = {}

    def read(client: Client, numbers: Sequence[int], *, whole: bool) -> None:
        for first in range(0, len(numbers), _MOST_SENT):
            pipeline, ends = Pipeline(), []
            for number in numbers[first : first + _MOST_SENT]:
                add(pipeline, number, whole=whole)
                ends.append(pipeline.commands)
            replies = client.exchange(pipeline)
            for reply in replies:
                if isinstance(reply, ResponseError) and is_transient(reply):
                    raise reply
            begins = [0, *ends]
            for number, begin, end in zip(numbers[first:], begins, ends, strict=False):
                found[number] = replies[begin:end]
        missing = [number for number in numbers if any(map(is_missing_script, found[number]))]
        if missing and not whole:
            read(client, missing, whole=True)

    for client in {id(each): each for each in clients}.values():
        numbers = [number for number, each in enumerate(clients) if each is client]
        client.retrying(lambda client=client, numbers=numbers: read(client, numbers, whole=False))  # type: ignore[misc]
    return [found[number] for number in range(len(clients))]
