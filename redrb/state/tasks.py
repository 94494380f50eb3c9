"""Reads tasks: one script of bounded work for each partition, sent together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from redis.exceptions import ResponseError

from redrb.connection import Client
from redrb.connection.failures import is_missing_script, is_transient, translate
from redrb.connection.transport import Pipeline, Reply, first_error
from redrb.damage import Reading
from redrb.errors import RedrbError, StoreDenied
from redrb.keys import is_name
from redrb.registry import ODD_NAME
from redrb.state.announced import Announced
from redrb.state.calls import Observe, Observed, ObservedGroup
from redrb.state.histogram import Histogram
from redrb.state.model import ConsumerGroupState, Staleness, TaskState, WorkerState
from redrb.state.workers import in_order, worker_state
from redrb.stream.task.ledger import AdmissionStats, StreamStats
from redrb.stream.task.settings import STORED_NAMES
from redrb.stream.task.store import TaskStore


def with_holdings(
    workers: Sequence[WorkerState], groups: Sequence[ConsumerGroupState]
) -> tuple[WorkerState, ...]:
    """Return the workers; those that are dead or have ended with what the task says they hold.

    Rights are counted by process. Leases are not counted by consumer: a dead worker holds at most
    those that no living worker has announced.

    Args:
        workers: All workers of a task, as they announced themselves.
        groups: The consumer groups of the task, the first of which has the counters of rights.
    """
    living = sum(each.leased for each in workers if not _is_over(each))
    leased = max(0, sum(group.stats.ledger.leased for group in groups) - living)
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

    return tuple(held(worker) if _is_over(worker) else worker for worker in workers)


def _is_over(worker: WorkerState) -> bool:
    return worker.life in ("dead", "ended")


_FIELDS = (*STORED_NAMES, "incarnation")
_HIDDEN = ("sampled", "order", "partitions")
_MOST_PARTITIONS = 1024
_MOST_SENT = 200
"""Most scripts that are sent together."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one partition of a task says."""

    fields: Mapping[str, str]
    put: int
    figures: Mapping[str, int]
    groups: Mapping[str, ConsumerGroupState]
    workers: tuple[WorkerState, ...]
    workers_total: int
    memory_bytes: int | None


def read_tasks(
    client: Client,
    namespace: str,
    names: Iterable[str],
    *,
    group: str | None,
    announced: dict[str, Announced],
) -> list[TaskState]:
    """Return the states of tasks; names without a task are left out.

    Args:
        client: A client.
        namespace: Namespace of the tasks.
        names: Their names.
        group: Consumer group that comes first, also if it has not joined; None: "default",
            unless only others have joined.
        announced: What earlier looks have read of workers, by prefix of the partition's keys; this
            look adds to it.
    """
    listed = list(names)
    named = list(filter(is_name, listed))
    stores = [TaskStore.of(client, namespace, name) for name in named]
    first = dict(zip(named, _observed(stores, group, announced), strict=True))
    rest = {
        name: TaskStore.of_partitions(client, namespace, name, count)[1:]
        for name, part in first.items()
        if isinstance(part, _Part) and (count := _partitions(part)) > 1
    }
    others = [store for each in rest.values() for store in each]
    further = iter(_observed(others, group, announced))
    for prefix in announced.keys() - {store.keys.prefix for store in (*stores, *others)}:
        del announced[prefix]
    states = [
        TaskState(name, readable=False, damage=ODD_NAME) for name in listed if not is_name(name)
    ]
    for name, part in first.items():
        parts = [part, *(next(further) for _ in rest.get(name, ()))]
        readable = [each for each in parts if isinstance(each, _Part)]
        damage = [str(each) for each in parts if not isinstance(each, _Part | StoreDenied)]
        if damage or not isinstance(part, _Part):
            states.append(TaskState(name, readable=False, damage="".join(damage[:1])))
        elif part.fields:
            states.append(_task(name, readable))
    return states


def _observed(
    stores: Sequence[TaskStore], group: str | None, announced: dict[str, Announced]
) -> list[_Part | RedrbError]:
    """Run the script on tasks: those that the same client reaches in one pipeline.

    An error takes the place of a task that the user may not read, or whose data is damaged.
    """
    found: dict[int, _Part | RedrbError] = {}
    by_client: dict[int, list[int]] = {}
    for number, store in enumerate(stores):
        by_client.setdefault(id(store.client), []).append(number)
    for numbers in by_client.values():
        there = [stores[number] for number in numbers]
        known = [announced.setdefault(store.keys.prefix, Announced()) for store in there]
        replies = _replies(there, group, known)
        for number, reply, workers in zip(numbers, replies, known, strict=True):
            found[number] = _part_or_error(reply, workers, stores[number])
    return [found[number] for number in range(len(stores))]


def _replies(
    stores: Sequence[TaskStore], group: str | None, known: Sequence[Announced]
) -> list[Reply]:
    client = stores[0].client

    def send(places: Sequence[int], *, whole: bool) -> list[Reply]:
        pipeline = Pipeline()
        for at in places:
            observe = Observe(group or "", known[at].since, _FIELDS)
            observe.add_to(pipeline, stores[at].script_keys, whole=whole)
        return client.exchange(pipeline)

    def attempt() -> list[Reply]:
        replies: list[Reply] = []
        for first in range(0, len(stores), _MOST_SENT):
            some = range(first, min(first + _MOST_SENT, len(stores)))
            replies += send(some, whole=False)
        missing = [at for at, reply in enumerate(replies) if is_missing_script(reply)]
        if missing:
            for at, reply in zip(missing, send(missing, whole=True), strict=True):
                replies[at] = reply
        error = first_error([each for each in replies if not _is_lasting(each)])
        if error is not None:
            raise error
        return replies

    return client.retrying(attempt)


def _is_lasting(reply: Reply) -> bool:
    """Return whether a reply is an error that concerns this task alone, and comes again."""
    return isinstance(reply, ResponseError) and not is_transient(reply)


def _part_or_error(reply: Reply, announced: Announced, store: TaskStore) -> _Part | RedrbError:
    try:
        if isinstance(reply, ResponseError):
            return translate(reply, store.client.where)
        with Reading(f"task {store.task!r}"):
            return _part(reply, announced)
    except RedrbError as error:
        return error


def _part(reply: Reply, announced: Announced) -> _Part:
    found = Observe("", "").read(reply)
    if not found.settings:
        return _Part({}, 0, {}, {}, (), 0, None)
    known = announced.note(found)
    read = (worker_state(*worker) for worker in known)
    return _Part(
        fields=found.settings,
        put=found.put,
        figures=found.figures,
        groups={group.name: _group(group, found) for group in found.groups},
        workers=tuple(worker for worker in read if worker is not None),
        workers_total=found.workers_total,
        memory_bytes=found.memory_bytes,
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


def _partitions(part: _Part) -> int:
    count = part.fields.get("partitions") or "1"
    return min(int(count), _MOST_PARTITIONS) if count.isdecimal() else 1


def _task(name: str, parts: Sequence[_Part]) -> TaskState:
    """Return a task from its partitions."""
    first = parts[0]
    put = sum(part.put for part in parts)
    names = sorted({name for part in parts for name in part.groups} - first.groups.keys())
    groups = tuple(
        _summed([_group_in(part, name) for part in parts]) for name in (*first.groups, *names)
    )
    stored = groups[0].stats if groups else StreamStats.of({})
    memory = [part.memory_bytes for part in parts]
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
        workers=with_holdings(in_order(_merged([part.workers for part in parts])), groups),
        workers_total=max(part.workers_total for part in parts),
        stored_bytes=round(stored.bytes_put / put * stored.stored) if put else 0,
        memory_bytes=None if None in memory else sum(filter(None, memory)),
    )


def _group_in(part: _Part, name: str) -> ConsumerGroupState:
    """Return a consumer group in one partition; where it has not joined, what it would find."""
    if name in part.groups:
        return part.groups[name]
    stored = part.figures["stored"]
    found = StreamStats.of({**part.figures, "put": stored, "waiting": stored})
    return ConsumerGroupState(name, found, Staleness(Histogram(unknown=stored)))


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
