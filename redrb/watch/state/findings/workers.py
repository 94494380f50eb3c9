"""Findings about workers: silent, dead and hanging ones, makers behind on weights, versions."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

from redrb.stream.announcement import EQUAL_REWARDS, MOST_ADDRESS, WaitsFor
from redrb.watch.state.findings.staleness import outlived
from redrb.watch.state.findings.wording import (
    finding_of,
    of_redrb,
    of_workers,
    own_command,
    redrb_command,
    seconds,
    worker_command,
)
from redrb.watch.state.model import Finding, State, TaskState, WorkerState
from redrb.words import counted

LONG_WITHOUT_WEIGHTS_S = 60.0
BEHIND = 10
"""Versions that a maker may be behind in a task without `max_staleness`."""

LONGER = 10
"""A step hangs that lasts so many times longer than the longest one of late."""

ENGINE_AWAY_S = 20.0
EQUAL_STEPS = 20
"""Steps without a difference between rewards, after which it is no chance."""

ALL_FILTERED = 16
"""Groups in a row that a maker filters, after which it is no chance."""

LONG_STARVED_S = 5.0
"""Seconds for which a trainer waits before makers that put nothing are a standstill."""

LEAST_HANG_S = 60.0
"""A step does not hang before, unless its owner has given a limit."""


def find(state: State) -> Iterator[Finding]:
    """Yield the findings about workers."""
    for task in state.tasks:
        yield from _lives(state, task)
        yield from _steps(state, task)
        yield from _weights(state, task)
    yield from _versions(state)


def _lives(state: State, task: TaskState) -> Iterator[Finding]:
    dead = [worker for worker in task.workers if worker.life == "dead"]
    taken_over = any(worker.life == "live" for worker in task.workers)
    yield from of_workers(
        "dead-worker",
        task,
        dead,
        _death,
        lambda worker: (
            _start_command(state, task, worker)
            if taken_over or not (worker.leased or worker.rights)
            else redrb_command(state, "doctor", task.name, "--repair")
        ),
    )
    figures = redrb_command(state, "stats", task.name)
    silent = [worker for worker in task.workers if worker.life == "silent"]
    yield from of_workers(
        "silent-worker",
        task,
        silent,
        lambda worker: (
            f"No heartbeat for {seconds(worker.seen_s)}{_place(worker)}; one is due every "
            f"{seconds(worker.period_s)}.{_returning(worker)}"
        ),
        lambda worker: f"ps -o pid,stat,etime,args -p {worker.pid}" if worker.pid else figures,
    )


def _start_command(state: State, task: TaskState, worker: WorkerState) -> str:
    if of_redrb(worker):
        return worker_command(state, task, worker.role)
    return own_command(worker) or f"ps -o pid,stat,etime,args -p {worker.pid}"


def hanging(task: TaskState) -> list[WorkerState]:
    """Return the trainers whose step lasts too long, and which hold groups meanwhile."""
    return [
        worker
        for worker in task.workers
        if worker.role == "trainer"
        and worker.life == "live"
        and worker.leased
        and (worker.step_limit_s or worker.usual_step_s)  # it has ended a step before
        and worker.step_s > (worker.step_limit_s or max(LEAST_HANG_S, LONGER * worker.usual_step_s))
    ]


def _filters_all(worker: WorkerState) -> bool:
    return worker.filtered >= ALL_FILTERED


def _lacks(what: WaitsFor, worker: WorkerState) -> bool:
    long_s = ENGINE_AWAY_S if what == "engine" else LONG_WITHOUT_WEIGHTS_S
    return worker.waits_for == what and worker.waits_s >= long_s


def standstill(task: TaskState) -> bool:
    """Return whether a taker waits, and no living maker puts, of each of which a finding says why.

    A stage that waits for a batch takes from this task, and makes nothing for it.
    """
    alive = [each for each in task.workers if each.alive]
    waits_s = max((each.waits_s for each in alive if each.waits_for == "batch"), default=0.0)
    useless = [
        _filters_all(each) or _lacks("weights", each) or _lacks("engine", each)
        for each in alive
        if each.role != "trainer" and each.waits_for != "batch"
    ]
    # filtered groups count as put, too
    puts = task.rates is not None and task.rates.put > task.rates.filtered
    return waits_s >= LONG_STARVED_S and not puts and bool(useless) and all(useless)


def _at_worst(task: TaskState, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield findings about makers, which are critical at a standstill."""
    for finding in findings:
        yield replace(finding, severity="critical") if standstill(task) else finding


def _steps(state: State, task: TaskState) -> Iterator[Finding]:
    def summary(worker: WorkerState) -> str:
        since = datetime.fromtimestamp(state.time - worker.step_s, UTC)
        usual = f"its longest one of late lasted {seconds(worker.usual_step_s)}"
        if worker.step_limit_s:
            usual = f"its step_limit is {seconds(worker.step_limit_s)}"
        return (
            f"Its step has lasted for {seconds(worker.step_s)}, "
            f"since {since:%Y-%m-%d %H:%M:%S} UTC; {usual}. Process {worker.pid} on {worker.host} "
            f"holds {counted(worker.leased, 'leased group')}."
        )

    yield from of_workers(
        "hanging-trainer",
        task,
        hanging(task),
        summary,
        lambda worker: f"ps -o pid,stat,wchan,etime,time,args -p {worker.pid}",
    )
    equal = [each for each in task.workers if each.metrics.get(EQUAL_REWARDS, 0) >= EQUAL_STEPS]
    yield from of_workers(
        "equal-rewards",
        task,
        [worker for worker in equal if worker.life == "live"],
        lambda worker: (
            f"In each of its last {worker.metrics[EQUAL_REWARDS]:,.0f} steps all samples had the "
            f"same reward; it is {worker.metrics.get('reward', 0):.3g} now."
        ),
        lambda _: redrb_command(state, "inspect", task.name),
    )

    filtering = of_workers(
        "filters-all",
        task,
        [each for each in task.workers if each.life == "live" and _filters_all(each)],
        lambda worker: (
            f"All of its last {worker.filtered:,} groups were filtered"
            + (f"; the newest fault: {worker.fault}." if worker.fault else ".")
        ),
        lambda _: redrb_command(state, "stats", task.name),
    )
    yield from _at_worst(task, filtering)


def _held(worker: WorkerState) -> str:
    kinds = {"leased group": worker.leased, "right": worker.rights}
    return " and ".join(counted(number, kind) for kind, number in kinds.items() if number)


def _returning(worker: WorkerState) -> str:
    """Return when others get what a silent worker holds."""
    left_s = worker.lease_s - worker.seen_s
    held = _held(worker)
    return f" It holds {held}, which return in {seconds(left_s)}." if held and left_s > 0 else ""


def _death(worker: WorkerState) -> str:
    held = _held(worker)
    holds = f"; it still holds {held}" if held else ""
    return f"No heartbeat for {seconds(worker.seen_s)}{_place(worker)}{holds}."


def _place(worker: WorkerState) -> str:
    program = f" ({worker.program})" if worker.program else ""
    return f" from process {worker.pid}{program} on {worker.host}" if worker.host else ""


def _weights(state: State, task: TaskState) -> Iterator[Finding]:
    makers = [worker for worker in task.workers if worker.role == "maker" and worker.life == "live"]
    waiting = of_workers(
        "waits-for-weights",
        task,
        [maker for maker in makers if _lacks("weights", maker)],
        lambda maker: f"It has waited for weights for {seconds(maker.waits_s)}.",
        lambda _: redrb_command(state, "weights", "ls"),
    )
    yield from _at_worst(task, waiting)
    figures = redrb_command(state, "stats", task.name)
    yield from of_workers(
        "waits-for-engine",
        task,
        [each for each in makers if _lacks("engine", each)],
        lambda maker: (
            f"Its inference server{_asked(maker)} has not answered for {seconds(maker.waits_s)}."
        ),
        lambda maker: (
            shlex.join(("curl", "-i", "--url", f"{maker.engine}/health"))
            if maker.engine and not _is_cut(maker)
            else figures
        ),
    )
    bound = BEHIND if task.max_staleness is None else task.max_staleness
    if outlived(state, task):
        return
    # one that waits loads the newest weights before it begins
    behind = [maker for maker in makers if maker.behind > bound and not maker.waits_for]
    yield from of_workers(
        "maker-behind",
        task,
        behind,
        lambda maker: (
            f"At its heartbeat {seconds(maker.seen_s)} ago it used weight version "
            f"{maker.weight_version:,}, {maker.behind:,} behind the newest; "
            f"more than {bound:,} is too many."
        ),
        lambda maker: f"kill -TERM {maker.pid}" if maker.pid else figures,
    )


def _is_cut(maker: WorkerState) -> bool:
    return len(maker.engine) >= MOST_ADDRESS


def _asked(maker: WorkerState) -> str:
    cut = "..." if _is_cut(maker) else ""
    return f" at {maker.engine}{cut} (asked from {maker.host})" if maker.engine else ""


def _versions(state: State) -> Iterator[Finding]:
    workers = {
        (worker.host, worker.pid): worker.redrb
        for task in state.tasks
        for worker in task.workers
        if worker.redrb and worker.alive
    }
    numbers = Counter(workers.values())
    if len(numbers) > 1:
        texts = (f"{counted(n, 'worker')} of {version}" for version, n in sorted(numbers.items()))
        text = f"Several versions of redrb work together: {', '.join(texts)}."
        command = "pip install --upgrade CLONE_OR_WHEEL"
        yield finding_of("mixed-redrb", f"namespace {state.namespace}", text, command)
