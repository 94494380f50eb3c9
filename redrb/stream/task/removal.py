"""Deletion of a task by its name: `redrb rm`."""

from __future__ import annotations

from dataclasses import dataclass

from redrb.connection import Client
from redrb.connection.transport import Pipeline
from redrb.registry import Registry
from redrb.stream.task.calls import Clear
from redrb.stream.task.lookup import existing_task, stats_of
from redrb.stream.task.store import TaskStore
from redrb.stream.task.stored_settings import caller

REMOVED_TTL_MS = 3_600_000
"""Time for which processes that used a removed task learn who has removed it."""


@dataclass(frozen=True, slots=True)
class GroupContents:
    """A consumer group of a task.

    Attributes:
        leased: Groups that its consumers lease.
        consumers: Processes of the consumers whose heartbeat is fresh, each as `<host>-<pid>`.
    """

    name: str
    waiting: int
    leased: int
    consumers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TaskContents:
    """The contents of a task, as they are shown before it is deleted.

    Attributes:
        stored: Groups that any consumer group needs.
        in_parts: Groups of which some parts wait.
        producers_waiting: Puts that wait for room.
        makers: Makers with rights to begin groups, or that wait for some, whose heartbeat is fresh.
    """

    task: str
    stored: int
    in_parts: int
    dead_letters: int
    producers_waiting: int
    makers: int
    consumer_groups: tuple[GroupContents, ...]


def task_contents(client: Client, task: str, *, namespace: str) -> TaskContents:
    """Return the contents of a task; raises UnknownTask if there is no such task."""
    store = existing_task(client, task, namespace=namespace)
    members = store.client.execute("SMEMBERS", store.keys.groups)
    names = {member.decode(errors="backslashreplace") for member in members}
    stats = {name: stats_of(store, name) for name in sorted(names) or ["default"]}
    whole = next(iter(stats.values()))
    return TaskContents(
        task=task,
        stored=whole.stored,
        in_parts=0 if whole.parts is None else whole.parts.groups,
        dead_letters=whole.dead_letters,
        producers_waiting=whole.producers_waiting,
        makers=whole.makers,
        consumer_groups=tuple(
            GroupContents(
                name, one.ledger.waiting, one.ledger.leased, _consumers(store, name, one.consumers)
            )
            for name, one in stats.items()
            if name in names
        ),
    )


def remove_task(client: Client, task: str, *, namespace: str) -> int:
    """Delete a task; returns the number of groups that were stored.

    Processes that use it are not looked for: `redrb/watch/state/alive.py` does that. A process that
    uses the task later creates it anew, unless it has opened the task with `create=False`.

    Raises:
        UnknownTask: There is no such task.
    """
    store = existing_task(client, task, namespace=namespace)
    stored = clear(store)
    forget_name(client, namespace, store)
    return stored


def clear(store: TaskStore) -> int:
    """Delete a task; returns the number of groups that were stored.

    A call that is repeated after a broken connection deletes no task that was created since.
    """
    look = Pipeline()
    look.add("HGET", store.keys.task, "incarnation")
    look.add("XLEN", store.keys.stream)
    incarnation, found = store.exchange(look)
    stored = store.call(Clear(caller(store), REMOVED_TTL_MS), incarnation or b"")
    return int(found) if stored is None else stored


def forget_name(client: Client, namespace: str, store: TaskStore) -> None:
    """Remove a deleted task's name, unless another process has created the task anew meanwhile."""
    registry = Registry(client, namespace)
    registry.remove("task", store.task)
    if store.client.execute("EXISTS", store.keys.task):
        registry.add("task", store.task)


def _consumers(store: TaskStore, group: str, alive: int) -> tuple[str, ...]:
    """Return the processes of as many consumers as are alive: those with the latest deadlines."""
    key = store.keys.consumers(group)
    found = store.client.execute("ZREVRANGEBYSCORE", key, "(+inf", "-inf", "LIMIT", 0, alive)
    names = (name.decode(errors="backslashreplace") for name in found)
    return tuple(dict.fromkeys(name.rsplit("-", 1)[0] for name in names))
