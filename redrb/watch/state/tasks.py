"""Reads tasks: one script of bounded work for each, sent together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from redis.exceptions import ResponseError

from redrb.connection import Client
from redrb.connection.failures import is_missing_script, is_transient, translate
from redrb.connection.transport import Pipeline, Reply
from redrb.errors import RedrbError, StoreDenied
from redrb.keys import is_task
from redrb.registry import ODD_NAME
from redrb.stream.task.ledger import AdmissionStats, StreamStats
from redrb.stream.task.settings import STORED_NAMES
from redrb.stream.task.store import TaskStore
from redrb.stream.task.stored_settings import shown_settings
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


_FIELDS = (*STORED_NAMES, "incarnation", "shards")


def read_tasks(
    client: Client, namespace: str, names: Iterable[str], group: str, known: dict[str, Announced]
) -> list[TaskState]:
    """Return the states of tasks; names without a task are left out.

    `group` is that of `StateReader`. `known` has what earlier looks have read of workers, by prefix
    of the task's keys; this look adds to it.
    """
    listed = list(names)
    stores = [TaskStore.of(client, namespace, name) for name in listed if is_task(name)]
    for prefix in known.keys() - {store.keys.prefix for store in stores}:
        del known[prefix]
    states = [
        TaskState(name, readable=False, damage=ODD_NAME) for name in listed if not is_task(name)
    ]
    return states + [found for found in _observed(stores, group, known) if found is not None]


def _observed(
    stores: Sequence[TaskStore], group: str, announced: dict[str, Announced]
) -> list[TaskState | None]:
    """Run the script on tasks; returns their states, None without a task."""
    known = [announced.setdefault(store.keys.prefix, Announced()) for store in stores]
    asked = [Observe(group, workers.since, _FIELDS) for workers in known]

    def add(pipeline: Pipeline, number: int) -> None:
        asked[number].add_to(pipeline, stores[number].script_keys)

    found: list[TaskState | None] = []
    replies = exchanged([store.client for store in stores], add)
    for store, call, workers, (reply,) in zip(stores, asked, known, replies, strict=True):
        try:
            if isinstance(reply, ResponseError):
                raise translate(reply, store.client.where)
            with Reading(f"task {store.task!r}"):
                found.append(_task(store.task, call.read(reply), workers))
        except StoreDenied:
            found.append(TaskState(store.task, readable=False))
        except RedrbError as error:
            found.append(TaskState(store.task, readable=False, damage=str(error)))
    return found


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


def _task(name: str, found: Observed, announced: Announced) -> TaskState | None:
    read = tuple(worker for each in announced.note(found) if (worker := worker_state(*each)))
    if not found.settings:
        return None
    shown = shown_settings(found.settings)
    groups = tuple(_group(group, found) for group in found.groups)
    stored = groups[0].stats if groups else StreamStats.of({})
    workers = shown_of(read)
    return TaskState(
        name=name,
        incarnation=found.settings.get("incarnation", ""),
        order=found.settings.get("order") or "fifo",
        settings={setting: text for setting, text in shown.items() if setting != "order"},
        groups=groups,
        odd_groups=found.odd_groups,
        workers=with_holdings(in_order(workers), groups),
        workers_total=found.workers_total - len(read) + len(workers),
        stored_bytes=round(stored.bytes_put / found.put * stored.stored) if found.put else 0,
        memory_bytes=found.memory_bytes,
        shards=int(found.settings.get("shards", 0)),
    )


_MOST_SENT: Final = 200
"""Most tasks or weights whose requests are sent together."""


def exchanged(clients: Sequence[Client], add: Callable[[Pipeline, int], None]) -> list[list[Reply]]:
    """Return the replies about each of several things, each of which a client reaches.

    `add` appends the commands about one of them, by its number, to a pipeline.

    An error that concerns one thing alone, and comes again, takes the place of its reply.
    """
    found: dict[int, list[Reply]] = {}

    def read(client: Client, numbers: Sequence[int], *, whole: bool) -> None:
        for first in range(0, len(numbers), _MOST_SENT):
            pipeline, ends = Pipeline(), []
            for number in numbers[first : first + _MOST_SENT]:
                add(pipeline, number)
                ends.append(pipeline.commands)
            replies = client.exchange(pipeline.with_texts() if whole else pipeline)
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
