"""Adds the rates between two looks to the newer one."""

from __future__ import annotations

from dataclasses import replace

from redrb.state.model import Rates, ServerState, State, TaskState, WorkerState

SHORTEST_S = 0.2
"""Shortest time between two looks over which a rate means something."""


def with_rates(state: State, before: State | None) -> State:
    """Return a state with rates since an earlier one.

    A task that was created anew, a worker that started anew, and a server that restarted have no
    rates until the next look.

    Args:
        state: The newer state.
        before: The earlier one; None: there is none.
    """
    if before is None or before.namespace != state.namespace:
        return state
    over_s = state.time - before.time
    if over_s < SHORTEST_S:
        return state
    tasks = {task.name: task for task in before.tasks}
    servers = {server.address: server for server in before.servers}
    return replace(
        state,
        tasks=tuple(_task(task, tasks.get(task.name), over_s) for task in state.tasks),
        servers=tuple(
            _server(server, servers.get(server.address), over_s) for server in state.servers
        ),
    )


def _task(task: TaskState, before: TaskState | None, over_s: float) -> TaskState:
    if before is None or before.incarnation != task.incarnation:
        return task
    workers = {worker.name: worker for worker in before.workers}
    return replace(
        task,
        rates=_rates(task, before, over_s),
        workers=tuple(_worker(one, workers.get(one.name), over_s) for one in task.workers),
    )


def _rates(task: TaskState, before: TaskState, over_s: float) -> Rates | None:
    new, old = task.main, before.main
    if new is None or old is None or new.name != old.name:
        return None
    if new.stats.joined != old.stats.joined:  # the ledger of a consumer group begins anew
        return None

    def rate(now: int, then: int) -> float:
        return max(0, now - then) / over_s

    ledgers = new.stats.ledger, old.stats.ledger
    fates = ("acked", "expired", "filtered", "evicted", "dead")
    return Rates(
        over_s=over_s,
        put=rate(ledgers[0].put, ledgers[1].put),
        samples_put=rate(new.stats.samples_put, old.stats.samples_put),
        samples_acked=rate(new.stats.samples_acked, old.stats.samples_acked),
        bytes_put=rate(new.stats.bytes_put, old.stats.bytes_put),
        **{fate: rate(getattr(ledgers[0], fate), getattr(ledgers[1], fate)) for fate in fates},
    )


def _worker(worker: WorkerState, before: WorkerState | None, over_s: float) -> WorkerState:
    """Return a worker with its rate: between its last two announcements."""
    if before is None or before.uptime_s > worker.uptime_s or worker.groups < before.groups:
        return worker
    if worker.life in ("dead", "ended"):
        return replace(worker, groups_per_s=0.0, samples_per_s=0.0)
    between_s = over_s + before.seen_s - worker.seen_s
    if between_s < SHORTEST_S:  # the same announcement
        return replace(worker, groups_per_s=before.groups_per_s, samples_per_s=before.samples_per_s)
    return replace(
        worker,
        groups_per_s=(worker.groups - before.groups) / between_s,
        samples_per_s=max(0, worker.samples - before.samples) / between_s,
    )


def _server(server: ServerState, before: ServerState | None, over_s: float) -> ServerState:
    if before is None or server.cpu_s < before.cpu_s:
        return server
    return replace(server, cpu_share=(server.cpu_s - before.cpu_s) / over_s)
