"""`task_stats`: the counters of a task, for commands that must not create it."""

from __future__ import annotations

from redrb.connection import Client
from redrb.errors import ConfigError
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
    _, *others = TaskStore.of_partitions(client, namespace, task, store.partitions)
    parts = [counters, *(TaskScripts(other).stats(group) for other in others)]
    return StreamStats.summed([StreamStats.of(part) for part in parts])
