"""`sums_of`: tasks of sums, one for the shards of each `ShardedStream`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from redrb.connection import Client
from redrb.keys import MOST_SHARDS
from redrb.stream.task.ledger import summed
from redrb.stream.task.store import TaskStore
from redrb.unpacking import Reading
from redrb.watch.state.histogram import Histogram
from redrb.watch.state.model import ConsumerGroupState, Staleness, TaskState, WorkerState

T = TypeVar("T")

_LIVES = ("ended", "live", "silent", "dead")
"""The lives of a worker, the worst last."""


def sums_of(tasks: Iterable[TaskState]) -> tuple[TaskState, ...]:
    """Return the sums of shards that can be read: `math@*` for `math@0`, `math@1` and so on.

    A consumer group is the sum of those of its name, and a worker stands for one process in all.
    """
    shards = (task for task in tasks if task.shards and task.groups)
    return tuple(_sum(each) for each in _alike(shards, lambda shard: shard.sum_name))


def shard_names(client: Client, namespace: str, name: str) -> list[str]:
    """Return the names of the tasks in a sum, such as "math@*"; of a task its own."""
    base = name.removesuffix("*")
    if not base.endswith("@"):
        return [name]
    store = TaskStore.of(client, namespace, f"{base}0")
    with Reading(f"the number of shards of task {base[:-1]!r}"):
        count = int(store.client.execute("HGET", store.keys.task, "shards") or 1)
    return [f"{base}{number}" for number in range(min(count, MOST_SHARDS))]


def _alike(things: Iterable[T], key: Callable[[T], object]) -> Iterator[list[T]]:
    """Yield the things that have the same key together."""
    found: dict[object, list[T]] = {}
    for each in things:
        found.setdefault(key(each), []).append(each)
    return iter(found.values())


def _sum(shards: list[TaskState]) -> TaskState:
    groups = _alike((group for shard in shards for group in shard.groups), lambda one: one.name)
    workers = list(_alike((one for shard in shards for one in shard.workers), _process))
    return replace(
        summed([replace(shard, groups=(), workers=()) for shard in shards]),
        name=shards[0].sum_name,
        shards=0,
        groups=tuple(map(_group, groups)),
        workers=tuple(map(_worker, workers)),
        workers_total=len(workers),
    )


def _group(groups: list[ConsumerGroupState]) -> ConsumerGroupState:
    staleness = [group.staleness for group in groups]
    histograms = (
        Histogram.summed([getattr(each, place) for each in staleness])
        for place in ("waiting", "leased", "taken")
    )
    stats = summed([group.stats for group in groups])
    return ConsumerGroupState(groups[0].name, stats, Staleness(*histograms))


def _process(worker: WorkerState) -> tuple[str, str, str]:
    return worker.name.rpartition("-")[0], worker.role, worker.label


def _worker(workers: list[WorkerState]) -> WorkerState:
    longest = sorted(workers, key=lambda worker: worker.waits_s, reverse=True)
    life = max((worker.life for worker in workers), key=_LIVES.index)
    return replace(summed(longest), life=life)
