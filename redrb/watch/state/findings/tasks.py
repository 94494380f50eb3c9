"""Findings about tasks: makers without trainers, trainers without makers, unread tasks."""

from __future__ import annotations

from collections.abc import Iterator

from redrb.watch.state.findings.wording import (
    command_line,
    finding_of,
    listed,
    of_workers,
    redrb_command,
    seconds,
    shown,
    subject_of,
    task_finding,
    worker_command,
)
from redrb.watch.state.findings.workers import hanging, standstill
from redrb.watch.state.model import ConsumerGroupState, Finding, State, TaskState, WorkerState
from redrb.watch.state.reader import MOST_NAMES
from redrb.watch.state.workers import LATE
from redrb.words import agreeing, counted

LONG_WITHOUT_MAKER_S = 5.0
LONG_WITH_MAKERS_S = 120.0
LONG_BLOCKED_S = 3.0
GROUP_OF_TRAINERS = "default"
"""Consumer group from which redrb-trainer takes."""


def find(state: State) -> Iterator[Finding]:
    """Yield the findings about tasks."""
    for task in state.tasks:
        if task.damage:
            continue
        if not task.readable:
            words = ("redrb", "acl", "--role=observer", f"--task={task.name}")
            command = command_line(words, namespace=state.namespace)
            text = "The task could not be read."
            yield finding_of("unreadable-task", subject_of(task), text, command)
            continue
        if not task.table:  # the makers of rows that it claims are not known
            yield from _trainers(state, task)
            yield from _dead_makers(state, task)
        waiting = [] if task.table else list(_makers(state, task))
        yield from waiting
        blocked = any(finding.code == "blocked-makers" for finding in waiting)
        for group in task.groups[1:] if blocked else task.groups:
            yield from _taken(state, task, group)
    for table in state.tables:
        if not (table.readable or table.damage):
            words = ("redrb", "acl", "--role=observer", f"--table={table.name}")
            command = command_line(words, namespace=state.namespace)
            text = "The table could not be read."
            yield finding_of("unreadable-task", f"table {table.name}", text, command)
    unread = state.tasks_total - MOST_NAMES  # the registry may have names without a task
    if unread > 0:
        subject = f"namespace {state.namespace}"
        were = agreeing(unread, "were")
        text = f"{counted(unread, 'task')} of {state.tasks_total:,} {were} not read."
        yield finding_of("unread-tasks", subject, text, redrb_command(state, "ls"))


def _alive(task: TaskState, *roles: str) -> list[WorkerState]:
    return [worker for worker in task.workers if worker.role in roles and worker.alive]


def _believed(task: TaskState, number: int, *roles: str) -> int:
    """Return a number of waiting or living workers of these roles, as a task counts them.

    The task counts a worker that was killed until others pass its place in a queue. So the number
    is 0 where workers of these roles have announced themselves and none of them is alive.
    """
    announced = any(worker.role in roles for worker in task.workers)
    return 0 if announced and not _alive(task, *roles) else number


def _takers(task: TaskState, group: ConsumerGroupState) -> int:
    """Return how many consumers of a consumer group live, or wait in a take, as far as known."""
    waiting = _believed(task, group.stats.consumers_waiting, "trainer", "stage")
    announced = len(_alive(task, "trainer", "stage")) if group is task.main else 0
    return group.stats.consumers + waiting + announced


def _has_makers(task: TaskState) -> bool:
    stats = task.main.stats if task.main else None
    waiting = stats.makers + stats.producers_waiting if stats else 0
    put = task.rates is not None and task.rates.put > 0
    return put or bool(_alive(task, "maker", "stage") or _believed(task, waiting, "maker", "stage"))


def _trainers(state: State, task: TaskState) -> Iterator[Finding]:
    made, hang = _has_makers(task), hanging(task)
    if made and standstill(task):
        return  # more of them would not help
    kind, long_s = (
        ("slow-makers", LONG_WITH_MAKERS_S) if made else ("starved-trainer", LONG_WITHOUT_MAKER_S)
    )
    starved = [
        worker
        for worker in _alive(task, "trainer")
        if worker.waits_for == "batch" and worker.waits_s >= long_s and worker not in hang
    ]
    waiting = task.main.stats.ledger.waiting if task.main else 0
    others = (
        f"{counted(len(_alive(task, 'maker')), 'maker', 'live')}" if made else "no maker is live"
    )
    yield from of_workers(
        kind,
        task,
        starved,
        lambda worker: (
            f"It has waited for a batch for {seconds(worker.waits_s)}; "
            f"{counted(waiting, 'group', 'wait')} in the task, and {others}."
        ),
        lambda _: worker_command(state, task, "maker"),
    )


def _dead_makers(state: State, task: TaskState) -> Iterator[Finding]:
    """Yield that training waits for rights which makers hold that are dead, or hang."""
    rights = task.main.stats.admission if task.main else None
    if task.main is None or rights is None or (rights.left > 0 and not rights.waiting):
        return
    takes = _believed(task, task.main.stats.consumers_waiting, "trainer", "stage")
    if not (takes or any(each.waits_for == "batch" for each in _alive(task, "trainer", "stage"))):
        return
    late = {name: held for name, held in rights.makers.items() if _is_late(task, name)}
    if not late:
        return
    who = f"the dead maker {shown(next(iter(late)))}"
    if len(late) > 1:
        who = f"{len(late):,} dead makers, {listed(list(map(shown, late)))}"
    last_s = max(rights.returns_s.get(name, 0.0) for name in late)
    text = f"Training waits for {counted(sum(late.values()), 'right')} of {who}; "
    text += f"they return in {seconds(last_s)}, unless a heartbeat comes."
    yield task_finding("waits-for-dead-maker", state, task, text, "stats", task.name)


def _is_late(task: TaskState, maker: str) -> bool:
    """Return whether no heartbeat of a maker comes: its worker is late, or was replaced."""
    process = maker.rpartition("-")[0] + "-"  # its name as a worker begins so, too
    workers = [worker for worker in task.workers if worker.name.startswith(process)]
    return not any(worker.alive and worker.life not in LATE for worker in workers)


def _makers(state: State, task: TaskState) -> Iterator[Finding]:
    if task.main is None:
        return
    stats = task.main.stats
    blocked = [
        worker for worker in _alive(task, "maker", "stage") if worker.waits_for in ("room", "right")
    ]
    puts = _believed(task, stats.producers_waiting, "maker", "stage")
    rights = _believed(task, stats.admission.waiting if stats.admission else 0, "maker", "stage")
    longest = max((worker.waits_s for worker in blocked), default=0.0)
    waits = [
        f"{counted(number, what)} for {thing}"
        for number, what, thing in (
            (puts, "put", "room"),
            (rights, "request", "the right to begin groups"),
        )
        if number
    ]
    summary = (
        f"Waiting: {' and '.join(waits) or counted(len(blocked), 'maker')}"
        + (f", the longest for {seconds(longest)}" if blocked else "")
        + f"; {counted(stats.stored, 'group', 'are')} stored"
        + (f", and the limit is {stats.limit:,}." if stats.limit else ".")
    )
    if not (puts or rights or blocked):
        return
    if not any(_takers(task, group) for group in task.groups):
        if not blocked or longest >= LONG_BLOCKED_S:
            command = _taking_command(state, task, task.main)
            batch = task.number("groups_per_version") or 0
            if 0 < stats.limit < batch:
                command = redrb_command(state, "set", task.name, "limit=none")
                summary += f" A version trains {batch:,} groups, so no batch is ever full, and a "
                summary += "trainer ends at once."
            yield finding_of("blocked-makers", subject_of(task), summary, command)
    elif puts and not hanging(task):
        limits = {name: task.number(name) for name in ("limit", "max_bytes")}
        larger = next((f"{name}={2 * most}" for name, most in limits.items() if most), None)
        words = ("set", task.name, larger) if larger else ("stats", task.name)
        yield task_finding("full-task", state, task, summary, *words)


def _taken(state: State, task: TaskState, group: ConsumerGroupState) -> Iterator[Finding]:
    waiting = group.stats.ledger.waiting
    if not waiting or _takers(task, group):
        return
    name = "" if group is task.main else f" of consumer group {group.name}"
    wait = agreeing(waiting, "wait")
    summary = f"{counted(waiting, 'group')}{name} {wait}, and no consumer is alive."
    kind = "nobody-takes" if _has_makers(task) else "idle-task"
    if task.table:
        kind = "unclaimed-rows"
        summary = f"{counted(waiting, 'group')} of rows{name} {wait}, and no process claims them."
    yield finding_of(kind, subject_of(task), summary, _taking_command(state, task, group))


def _taking_command(state: State, task: TaskState, group: ConsumerGroupState) -> str:
    """Return the command that starts a trainer; figures where it is not known.

    Of programs of the user, only one that has taken before is known.
    """
    if group.name != GROUP_OF_TRAINERS or task.table:
        return redrb_command(state, "stats", task.name, f"--group={group.name}")
    return worker_command(state, task, "trainer")
