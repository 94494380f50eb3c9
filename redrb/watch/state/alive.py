"""The processes that use a task or a table: they must stop before it is deleted."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from redrb.connection import Client
from redrb.errors import TaskInUse
from redrb.keys import TableKeys
from redrb.stream.task.lookup import unknown_task
from redrb.stream.task.removal import TaskContents, task_contents
from redrb.watch.state.model import TableState, WorkerState
from redrb.watch.state.tables import read_tables
from redrb.watch.state.tasks import read_tasks

_LOOK_AGAIN_S = 1.0
"""Seconds between two looks at a table, which show whether somebody puts rows."""


@dataclass(frozen=True, slots=True)
class TaskUse:
    """What a task holds, and who uses it: workers that have announced themselves lately."""

    contents: TaskContents
    workers: tuple[WorkerState, ...]

    @property
    def users(self) -> tuple[str, ...]:
        """The processes that use it: those of `workers`, and others with a heartbeat or a wait."""
        announced, found = set(), []
        for worker in self.workers:
            announced.add((worker.host, str(worker.pid)))
            name = worker.label or worker.name
            found.append(f"{worker.role} {name} (process {worker.pid} on {worker.host})")
        for group in self.contents.consumer_groups:
            for consumer in group.consumers:
                host, _, pid = consumer.rpartition("-")
                if (host, pid) not in announced:
                    found.append(f"a consumer of group {group.name} (process {pid} on {host})")
        if self.contents.makers and all(worker.role == "trainer" for worker in self.workers):
            number = self.contents.makers
            found.append(f"makers that have or wait for rights to begin groups ({number})")
        if self.contents.producers_waiting:
            found.append(f"puts that wait for room ({self.contents.producers_waiting})")
        return tuple(dict.fromkeys(found))

    def check(self, namespace: str) -> None:
        """Refuse a task in use.

        Raises:
            TaskInUse: The message names the processes.
        """
        _check(f"task {self.contents.task!r}", self.users, namespace)


@dataclass(frozen=True, slots=True)
class TableUse:
    """What a table holds, and who uses it.

    Attributes:
        tasks: The tasks that claim its rows.
        writers: Puts that wait for room, processes that watch it, and whether rows changed within
            a second: a process that puts rows has no heartbeat.
    """

    state: TableState
    tasks: tuple[TaskUse, ...]
    writers: tuple[str, ...]

    @property
    def users(self) -> tuple[str, ...]:
        """The processes that use it."""
        claiming = (
            f"{user} of task {use.contents.task}" for use in self.tasks for user in use.users
        )
        return (*claiming, *self.writers)

    def check(self, namespace: str) -> None:
        """Refuse a table in use; raises TaskInUse, whose message names the processes."""
        _check(f"table {self.state.name!r}", self.users, namespace)


def _check(what: str, users: Sequence[str], namespace: str) -> None:
    if users:
        raise TaskInUse(
            f"{what} of namespace {namespace!r} is in use by {', '.join(users)}. Stop them, or "
            "delete it by force (--force). A process that was killed counts as alive until its "
            "lease_ms, 30 seconds by default, are over."
        )


def table_use(client: Client, table: str, *, namespace: str) -> TableUse:
    """Return what a table holds and who uses it; raises UnknownTask if there is none."""
    before = _table(client, table, namespace)
    threading.Event().wait(_LOOK_AGAIN_S)
    state = _table(client, table, namespace)
    prefix = TableKeys.of(namespace, table).prefix
    node = client.at(prefix)
    waiting = {
        "puts that wait for room": node.execute("ZCARD", f"{prefix}queue:#room"),
        "processes that watch it": node.execute("ZCARD", f"{prefix}queue:#watch"),
    }
    tasks = tuple(task_use(client, claim.name, namespace=namespace) for claim in state.claims)
    writers = [f"{who} ({number})" for who, number in waiting.items() if number]
    writers += ["a process that changes rows"] if state.change != before.change else []
    return TableUse(state, tasks, tuple(writers))


def _table(client: Client, table: str, namespace: str) -> TableState:
    for state in read_tables(client, namespace, [table]):
        if state.readable:
            return state
    raise unknown_task(client, namespace, table)


def task_use(client: Client, task: str, *, namespace: str) -> TaskUse:
    """Return what a task holds and who uses it.

    A maker shows a few seconds after its first put, unless it waits for room or for rights before.

    Raises:
        UnknownTask: There is no such task.
    """
    contents = task_contents(client, task, namespace=namespace)
    found = read_tasks(client, namespace, [task], "", {})
    workers = (worker for state in found for worker in state.workers)
    return TaskUse(contents, tuple(one for one in workers if one.alive))
