"""Tasks of a namespace, from its registry: listed, and removed when they are deleted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from redrb.connection import Client
from redrb.errors import StoreDenied, UnknownTask
from redrb.keys import is_name
from redrb.orders import Fifo
from redrb.registry import Registry
from redrb.stream.task.inspection import existing_task
from redrb.stream.task.ledger import StreamStats
from redrb.stream.task.scripts import TaskScripts
from redrb.stream.task.store import TaskStore


@dataclass(frozen=True, slots=True)
class ListedTask:
    """A task of a namespace.

    Attributes:
        name: Its name.
        order: Name of its order; "" if the user may not read the task.
        partitions: Number of its partitions.
        stored_bytes: Bytes of the stored groups, estimated by the mean size of all groups ever put.
        stats: Its counters as a consumer group sees them; None if the user may not read the task.
    """

    name: str
    order: str = ""
    partitions: int = 1
    stored_bytes: int = 0
    stats: StreamStats | None = None


def tasks_in(client: Client, namespace: str, *, group: str) -> Iterator[ListedTask]:
    """Yield the tasks of a namespace, by name, as a consumer group sees them.

    Names in the registry without a task are left out.
    """
    for name in filter(is_name, Registry(client, namespace).names("task")):
        try:
            yield _listed(client, namespace, name, group)
        except UnknownTask:
            continue
        except StoreDenied:
            yield ListedTask(name)


def forget_name(client: Client, namespace: str, store: TaskStore) -> None:
    """Remove a deleted task's name, unless another process has created the task anew meanwhile."""
    registry = Registry(client, namespace)
    registry.remove("task", store.task)
    if store.client.execute("EXISTS", store.keys.task):
        registry.add("task", store.task)


def _listed(client: Client, namespace: str, name: str, group: str) -> ListedTask:
    stores = existing_task(client, name, namespace=namespace)
    parts = [StreamStats.of(TaskScripts(store).stats(group)) for store in stores]
    stats = StreamStats.summed(parts)
    order = stores[0].client.execute("HGET", stores[0].keys.task, "order")
    put = sum(int(store.client.execute("HGET", store.keys.puts, "put") or 0) for store in stores)
    return ListedTask(
        name=name,
        order=order.decode() if order else Fifo.name,
        partitions=len(stores),
        stored_bytes=round(stats.bytes_put / put * stats.stored) if put else 0,
        stats=stats,
    )
