"""Looks at tasks without creating them: whether they exist, and their counters."""

from __future__ import annotations

from redrb.connection import Client
from redrb.errors import StoreError
from redrb.experience import Status
from redrb.stream.task.calls import Count, Stats
from redrb.stream.task.ledger import StreamStats
from redrb.stream.task.reach import Reach
from redrb.stream.task.similar_tasks import unknown_task
from redrb.stream.task.store import TaskStore


def existing_task(client: Client, task: str, *, namespace: str) -> list[TaskStore]:
    """Return the stores of all partitions of a task; of one without partitions, its only store.

    Raises:
        UnknownTask: There is no such task; the message names similar ones.
        StoreError: Its settings are lost, and its groups are not.
    """
    store = TaskStore.of(client, namespace, task)
    if not store.client.execute("EXISTS", store.keys.task):
        if store.client.execute("EXISTS", *store.keys.contents):
            raise StoreError(
                f"the key {store.keys.task} is lost, with the settings of groups that are stored. "
                f"Run `redrb doctor {task} --repair`, after which processes can give the settings "
                "again."
            )
        raise unknown_task(client, namespace, task)
    return TaskStore.of_partitions(client, namespace, task, store.partitions)


def task_stats(client: Client, task: str, *, namespace: str, group: str) -> StreamStats:
    """Return a task's counters as a consumer group sees them; those of partitions are added up.

    Partitions that cannot be reached are left out, and named; partition 0 must be reached.

    Raises:
        UnknownTask: There is no such task.
    """
    return summed_stats(Reach(existing_task(client, task, namespace=namespace)), group)


def summed_stats(reach: Reach, group: str) -> StreamStats:
    """Return the counters of a task, the sum of those of the partitions that can be reached."""
    parts = reach.ask(lambda number: stats_of(reach.stores[number], group))
    missing = [number for number in range(len(reach.stores)) if number not in parts]
    return StreamStats.summed(list(parts.values()), missing)


def stats_of(store: TaskStore, group: str) -> StreamStats:
    """Return the counters of a task, or of a partition, as a consumer group sees them."""
    figures = store.call(Stats(group))
    return StreamStats.of(figures or {})


def count_waiting(store: TaskStore, group: str, status: Status, where: str) -> int:
    """Return how many groups wait for a consumer group; before it joins, how many it would find."""
    page = store.call(Count(group, status, where))
    found = page.found
    while page.place != "0":
        page = store.call(Count(group, status, where, page.place))
        found += page.found
    return found
