"""The workers of a task that are alive, by name: who must stop before it is deleted."""

from __future__ import annotations

from redrb.connection import Client
from redrb.errors import TaskInUse
from redrb.state.model import WorkerState
from redrb.state.tasks import read_tasks


def workers_alive(client: Client, task: str, *, namespace: str) -> tuple[WorkerState, ...]:
    """Return the makers, trainers and stages of a task that have announced themselves lately."""
    found = read_tasks(client, namespace, [task], group=None, announced={})
    workers = (worker for state in found for worker in state.workers)
    return tuple(worker for worker in workers if worker.life in ("live", "silent"))


def check_unused(client: Client, task: str, *, namespace: str) -> None:
    """Refuse a task whose workers are alive.

    Raises:
        TaskInUse: The message names them.
    """
    alive = workers_alive(client, task, namespace=namespace)
    if alive:
        raise TaskInUse(
            f"task {task!r} of namespace {namespace!r} is in use by {listed(alive)}. Stop them, or "
            "delete it by force (--force). A process that was killed counts as alive until its "
            "lease_ms, 30 seconds by default, are over."
        )


def listed(workers: tuple[WorkerState, ...]) -> str:
    """Return the names of workers, each with its host and process."""
    return ", ".join(
        f"{each.role} {each.label or each.name} (process {each.pid} on {each.host})"
        for each in workers
    )
