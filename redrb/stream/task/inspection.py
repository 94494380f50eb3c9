"""`task_stats`: the counters of a task, for commands that must not create it."""

from __future__ import annotations

from redrb.connection import Client
from redrb.errors import ConfigError
from redrb.keys import TaskKeys
from redrb.stream.task.ledger import StreamStats
from redrb.stream.task.scripts import TaskScripts
from redrb.stream.task.store import TaskStore


def task_stats(client: Client, task: str, *, namespace: str, group: str) -> StreamStats:
    """Return a task's counters as a consumer group sees them; those of partitions are added up.

    Raises:
        ConfigError: There is no such task.
    """
    store = TaskStore.of(client, namespace, task)
    counters = TaskScripts(store).stats(group)
    if not counters:
        raise ConfigError(
            f"there is no task {task!r} in namespace {namespace!r} at {client.where}."
        )
    count = int(store.client.execute("HGET", store.keys.task, "partitions") or 1)
    parts = [counters]
    for number in range(1, count):
        keys = TaskKeys.of_partition(namespace, task, number, count)
        parts.append(TaskScripts(TaskStore(client, task, keys)).stats(group))
    return StreamStats.summed([StreamStats.of(part) for part in parts])
