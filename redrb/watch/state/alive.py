"""The processes that use a task: they must stop before it is deleted."""

from __future__ import annotations

from dataclasses import dataclass

from redrb.connection import Client
from redrb.errors import TaskInUse
from redrb.stream.task.removal import TaskContents, task_contents
from redrb.watch.state.model import WorkerState
from redrb.watch.state.tasks import read_tasks


@dataclass(frozen=True, slots=True)
class TaskUse:
    """What a task holds, and who uses it.

    Attributes:
        workers: Makers, trainers and stages that have announced themselves lately.
    """

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
        users = self.users
        if users:
            raise TaskInUse(
                f"task {self.contents.task!r} of namespace {namespace!r} is in use by "
                f"{', '.join(users)}. Stop them, or delete it by force (--force). A process that "
                "was killed counts as alive until its lease_ms, 30 seconds by default, are over."
            )


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
