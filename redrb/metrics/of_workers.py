"""The metrics of workers: of at most 200 of them, the newest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from redrb.metrics.metric import Kind, Metric, Sample
from redrb.state.model import State, TaskState, WorkerState

MOST_WORKERS = 200
"""Most workers with metrics of their own; `redrb_workers` counts all."""

DEAD_S = 600.0
"""Seconds after its last announcement for which a dead worker is shown."""

_LABELS = ("task", "role", "worker")


def shown_workers(state: State) -> list[tuple[TaskState, WorkerState]]:
    """Return the workers that have metrics of their own: those that announced themselves last.

    Workers that have ended are left out, and dead ones ten minutes after their last announcement.
    """
    found = [
        (task, worker)
        for task in state.tasks
        for worker in task.workers
        if worker.life != "ended" and (worker.life != "dead" or worker.seen_s < DEAD_S)
    ]
    found.sort(key=lambda each: each[1].seen_s)
    return found[:MOST_WORKERS]


def _of_worker(
    name: str,
    kind: Kind,
    text: str,
    value: Callable[[TaskState, WorkerState], float | None],
    *,
    dead: bool = False,
) -> Metric:
    """Return a metric with a sample for each worker; of dead ones only if `dead`."""

    def read(state: State) -> Iterator[Sample]:
        for task, worker in shown_workers(state):
            found = value(task, worker) if dead or worker.life != "dead" else None
            if found is not None:
                yield (task.name, worker.role, worker.name), found

    return Metric(name, kind, text, _LABELS, read)


def _counted(state: State) -> Iterator[Sample]:
    for task in state.tasks:
        lives = Counter((worker.role, worker.life) for worker in task.workers)
        for (role, life), number in lives.items():
            yield (task.name, role, life), number


def _waits(state: State) -> Iterator[Sample]:
    for task, worker in shown_workers(state):
        if worker.waits_for and worker.life != "dead":
            yield (task.name, worker.role, worker.name, worker.waits_for), worker.waits_s


def _figure(*names: str) -> Callable[[TaskState, WorkerState], float | None]:
    """Return the first of these figures that a worker has announced."""

    def value(_: TaskState, worker: WorkerState) -> float | None:
        return next((worker.metrics[name] for name in names if name in worker.metrics), None)

    return value


WORKER_METRICS: tuple[Metric, ...] = (
    Metric(
        "redrb_workers",
        "gauge",
        "Workers by role and life: live, silent (a heartbeat is overdue), dead, ended; of each "
        "task at most 200, the newest.",
        ("task", "role", "life"),
        _counted,
    ),
    _of_worker(
        "redrb_worker_up",
        "gauge",
        "1 while the worker's heartbeat comes; 0 for ten minutes after it died.",
        lambda _, worker: worker.life != "dead",
        dead=True,
    ),
    _of_worker(
        "redrb_worker_seen_seconds",
        "gauge",
        "Seconds since the worker's last announcement.",
        lambda _, worker: worker.seen_s,
        dead=True,
    ),
    _of_worker(
        "redrb_worker_uptime_seconds",
        "gauge",
        "Seconds since the worker began.",
        lambda _, worker: worker.uptime_s,
    ),
    _of_worker(
        "redrb_worker_groups_total",
        "counter",
        "Groups that the worker has put, or acknowledged, since it began.",
        lambda _, worker: worker.groups,
    ),
    _of_worker(
        "redrb_worker_samples_total",
        "counter",
        "Samples in these groups.",
        lambda _, worker: worker.samples,
    ),
    _of_worker(
        "redrb_worker_leased_groups",
        "gauge",
        "Groups that the worker leases.",
        lambda _, worker: worker.leased,
    ),
    _of_worker(
        "redrb_worker_rights_held",
        "gauge",
        "Rights to begin groups that the worker holds.",
        lambda _, worker: worker.rights,
    ),
    _of_worker(
        "redrb_worker_version",
        "gauge",
        "Weight version that the worker uses or has published; absent before the first one.",
        lambda _, worker: worker.weight_version or None,
    ),
    _of_worker(
        "redrb_worker_behind_versions",
        "gauge",
        "Weight versions that the task knew at the worker's last announcement, and that it did not "
        "use.",
        lambda _, worker: worker.behind if worker.weight_version else None,
    ),
    Metric(
        "redrb_worker_waiting_seconds",
        "gauge",
        "Seconds for which the worker has waited: for a batch, room, a right or weights; absent "
        "while it works.",
        (*_LABELS, "waits_for"),
        _waits,
    ),
    _of_worker(
        "redrb_worker_steps_total",
        "counter",
        "Steps that the worker has ended since it began: of a trainer or stage from a batch to the "
        "request for the next one, of a maker from its right to begin groups until they are put.",
        lambda _, worker: worker.steps,
    ),
    _of_worker(
        "redrb_worker_step_seconds_total",
        "counter",
        "Seconds that these steps lasted; the rest of a trainer's time it waited for batches.",
        lambda _, worker: worker.steps_s,
    ),
    _of_worker(
        "redrb_worker_reward",
        "gauge",
        "Mean reward that the worker announced last.",
        _figure("reward"),
    ),
    _of_worker(
        "redrb_worker_loss",
        "gauge",
        "Loss that the worker announced last.",
        _figure("loss", "actor_loss"),
    ),
    _of_worker(
        "redrb_worker_kl",
        "gauge",
        "KL divergence that the worker announced last.",
        _figure("kl", "approx_kl"),
    ),
)
"""The metrics of workers, as their announcements say them."""
