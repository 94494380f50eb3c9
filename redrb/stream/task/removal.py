"""Deletion of a task by its name: `redrb rm`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redrb.connection import Client
from redrb.errors import TaskInUse
from redrb.stream.task.inspection import existing_task
from redrb.stream.task.ledger import StreamStats
from redrb.stream.task.registration import forget_name
from redrb.stream.task.scripts import TaskScripts
from redrb.stream.task.store import TaskStore


@dataclass(frozen=True, slots=True)
class GroupContents:
    """A consumer group of a task.

    Attributes:
        name: Its name.
        waiting: Groups that wait for it.
        leased: Groups that its consumers lease.
        consumers: Consumers whose heartbeat is fresh.
    """

    name: str
    waiting: int
    leased: int
    consumers: int


@dataclass(frozen=True, slots=True)
class TaskContents:
    """The contents of a task, as they are shown before it is deleted.

    Attributes:
        task: Its name.
        stored: Groups that any consumer group needs.
        in_parts: Groups of which some parts wait.
        archived: Acknowledged groups that are kept as history.
        dead_letters: Dead letters.
        producers_waiting: Puts that wait for room.
        makers: Makers with rights to begin groups, or that wait for some, whose heartbeat is fresh.
        consumer_groups: The consumer groups.
    """

    task: str
    stored: int
    in_parts: int
    archived: int
    dead_letters: int
    producers_waiting: int
    makers: int
    consumer_groups: tuple[GroupContents, ...]

    @property
    def consumers(self) -> int:
        """Consumers of all consumer groups whose heartbeat is fresh."""
        return sum(one.consumers for one in self.consumer_groups)


def task_contents(client: Client, task: str, *, namespace: str) -> TaskContents:
    """Return the contents of a task.

    Raises:
        UnknownTask: There is no such task.
    """
    stores = existing_task(client, task, namespace=namespace)
    names = {
        member.decode(errors="backslashreplace")
        for store in stores
        for member in store.client.execute("SMEMBERS", store.keys.groups)
    }
    stats = {name: _stats(stores, name) for name in sorted(names)}
    whole = next(iter(stats.values()), None) or _stats(stores, "default")
    return TaskContents(
        task=task,
        stored=whole.stored,
        in_parts=0 if whole.parts is None else whole.parts.groups,
        archived=whole.archived,
        dead_letters=whole.dead_letters,
        producers_waiting=whole.producers_waiting,
        makers=whole.makers,
        consumer_groups=tuple(
            GroupContents(name, one.ledger.waiting, one.ledger.leased, one.consumers)
            for name, one in stats.items()
        ),
    )


def remove_task(client: Client, task: str, *, namespace: str, force: bool = False) -> int:
    """Delete a task with all its partitions, the first one last; returns the groups stored.

    A producer without a waiting put, or a right to begin a group, leaves no sign of life: stop the
    makers first. A process that uses the task later creates it anew, unless it has opened the task
    with `create=False`.

    Args:
        client: The client that `redrb.connect` returned.
        task: Name of the task.
        namespace: Its namespace.
        force: Delete it although consumers or makers with rights live, or puts wait.

    Raises:
        UnknownTask: There is no such task.
        TaskInUse: Consumers or makers with rights live, or puts wait, and `force` is not given.
    """
    contents = task_contents(client, task, namespace=namespace)
    if (contents.consumers or contents.producers_waiting or contents.makers) and not force:
        raise TaskInUse(
            f"task {task!r} is in use: consumers alive: {contents.consumers}, makers alive that "
            f"have or wait for rights to begin groups: {contents.makers}, puts that wait for room: "
            f"{contents.producers_waiting}. Stop them, or delete it by force (--force). A process "
            "that was killed counts as alive until its lease_ms, 30 seconds by default, are over."
        )
    stores = existing_task(client, task, namespace=namespace)
    stored = sum(TaskScripts(store).clear() for store in reversed(stores))
    forget_name(client, namespace, stores[0])
    return stored


def _stats(stores: Sequence[TaskStore], group: str) -> StreamStats:
    return StreamStats.summed([StreamStats.of(TaskScripts(one).stats(group)) for one in stores])
