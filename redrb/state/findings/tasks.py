"""Findings about tasks: who puts without who takes, and the reverse; dead letters; the ledger."""

from __future__ import annotations

from collections.abc import Iterator

from redrb.state.finding import Finding, FindingKind
from redrb.state.findings.wording import (
    counted,
    number_of,
    of_workers,
    redrb_command,
    seconds,
    subject_of,
    worker_command,
)
from redrb.state.model import ConsumerGroupState, State, TaskState, WorkerState
from redrb.state.reader import MOST_NAMES
from redrb.stream.task.settings import DEFAULT_MAX_DEAD

LONG_WITHOUT_MAKER_S = 5.0
LONG_WITH_MAKERS_S = 120.0
LONG_BLOCKED_S = 3.0

STARVED_TRAINER = FindingKind(
    "starved-trainer",
    "critical",
    "No maker works on the task: all have ended, died, or put into another task or namespace.",
)
BLOCKED_MAKERS = FindingKind(
    "blocked-makers",
    "critical",
    "No trainer takes from the task, so that it stays full. Nothing goes on until one starts.",
)
UNBALANCED_LEDGER = FindingKind(
    "unbalanced-ledger",
    "critical",
    "A group was lost or counted twice: keys of the task were changed or deleted by other programs "
    "or evicted by the server, a replica without all data took over, or redrb has a defect.",
)
GROWING_DEAD_LETTERS = FindingKind(
    "growing-dead-letters",
    "critical",
    "Groups fail again and again: a trainer or a stage rejects them, raises an error on them, or "
    "dies from them. They are not trained.",
)
FULL_DEAD_LETTERS = FindingKind(
    "full-dead-letters",
    "critical",
    "The task has as many dead letters as max_dead allows. Each further one deletes the oldest for "
    "good.",
)
DEAD_LETTERS = FindingKind(
    "dead-letters",
    "warning",
    "A trainer or a stage rejected these groups, or their delivery failed max_deliveries times. "
    "They are not trained until they are requeued. Look at them, and mend what failed; then redrb "
    "dead requeue lets them wait again, and redrb dead drop deletes them.",
)
SLOW_MAKERS = FindingKind(
    "slow-makers",
    "warning",
    "The makers make fewer groups than the trainer could train, or some of them hang.",
)
NOBODY_TAKES = FindingKind(
    "nobody-takes",
    "warning",
    "Groups are put, and no trainer takes them: it has ended, has died, or takes from another task "
    "or consumer group.",
)
FULL_TASK = FindingKind(
    "full-task",
    "info",
    "The makers are faster than the trainers. They wait, and nothing is lost.",
)
IDLE_TASK = FindingKind(
    "idle-task",
    "info",
    "The run has ended, has not begun again, or its trainer takes from another task or namespace. "
    "The groups stay stored; redrb rm deletes the task if nobody needs them.",
)
UNREADABLE_TASK = FindingKind(
    "unreadable-task",
    "info",
    "This user of Redis has no right to read the task.",
)
UNREAD_TASKS = FindingKind(
    "unread-tasks",
    "info",
    "The namespace has more tasks than one look reads. Their troubles are not shown.",
)
KINDS = (
    STARVED_TRAINER,
    BLOCKED_MAKERS,
    UNBALANCED_LEDGER,
    GROWING_DEAD_LETTERS,
    FULL_DEAD_LETTERS,
    DEAD_LETTERS,
    SLOW_MAKERS,
    NOBODY_TAKES,
    FULL_TASK,
    IDLE_TASK,
    UNREADABLE_TASK,
    UNREAD_TASKS,
)


def find(state: State) -> Iterator[Finding]:
    """Yield the findings about tasks."""
    for task in state.tasks:
        if not task.readable:
            yield UNREADABLE_TASK.found(
                subject_of(task),
                "The task could not be read.",
                f"redrb acl --role observer --task {task.name} --namespace {state.namespace}",
            )
            continue
        yield from _trainers(state, task)
        waiting = list(_makers(state, task))
        yield from waiting
        blocked = any(finding.code == BLOCKED_MAKERS.code for finding in waiting)
        for group in task.groups[1:] if blocked else task.groups:
            yield from _taken(state, task, group)
        yield from _dead_letters(state, task)
        yield from _ledger(state, task)
    unread = state.tasks_total - MOST_NAMES  # the registry may have names without a task
    if unread > 0:
        yield UNREAD_TASKS.found(
            f"namespace {state.namespace}",
            f"{counted(unread, 'task')} of {state.tasks_total:,} were not read.",
            redrb_command(state.namespace, "ls"),
        )


def _alive(task: TaskState, *roles: str) -> list[WorkerState]:
    return [
        worker
        for worker in task.workers
        if worker.role in roles and worker.life in ("live", "silent")
    ]


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
    """Return whether somebody puts, or did between two looks."""
    stats = task.main.stats if task.main else None
    waiting = stats.makers + stats.producers_waiting if stats else 0
    put = task.rates is not None and task.rates.put > 0
    return put or bool(_alive(task, "maker", "stage") or _believed(task, waiting, "maker", "stage"))


def _trainers(state: State, task: TaskState) -> Iterator[Finding]:
    """Find trainers that wait for batches."""
    made = _has_makers(task)
    kind, long_s = (
        (SLOW_MAKERS, LONG_WITH_MAKERS_S) if made else (STARVED_TRAINER, LONG_WITHOUT_MAKER_S)
    )
    starved = [
        worker
        for worker in _alive(task, "trainer")
        if worker.waits_for == "batch" and worker.waits_s >= long_s
    ]
    waiting = task.main.stats.ledger.waiting if task.main else 0
    others = f"{counted(len(_alive(task, 'maker')), 'maker')} live" if made else "no maker is live"
    yield from of_workers(
        *(kind, task, starved),
        lambda worker: (
            f"It has waited for a batch for {seconds(worker.waits_s)}; "
            f"{counted(waiting, 'group')} wait in the task, and {others}."
        ),
        redrb_command(state.namespace, "stats", task.name)
        if made
        else worker_command(state, task, "maker"),
    )


def _makers(state: State, task: TaskState) -> Iterator[Finding]:
    """Find makers that wait for room or for rights."""
    if task.main is None:
        return
    stats = task.main.stats
    blocked = [
        worker for worker in _alive(task, "maker", "stage") if worker.waits_for in ("room", "right")
    ]
    puts = _believed(task, stats.producers_waiting, "maker", "stage")
    rights = _believed(task, stats.admission.waiting if stats.admission else 0, "maker", "stage")
    longest = max((worker.waits_s for worker in blocked), default=0.0)
    summary = (
        f"Waiting: {counted(puts, 'put')} for room and "
        f"{counted(rights, 'request')} for the right to begin groups"
        + (f", the longest for {seconds(longest)}" if blocked else "")
        + f"; {counted(stats.stored, 'group')} are stored"
        + (f", and the limit is {stats.limit:,}." if stats.limit else ".")
    )
    if not (puts or rights or blocked):
        return
    if not any(_takers(task, group) for group in task.groups):
        if not blocked or longest >= LONG_BLOCKED_S:
            yield BLOCKED_MAKERS.found(
                subject_of(task), summary, worker_command(state, task, "trainer")
            )
    elif puts:
        limit = f"limit={2 * stats.limit}" if stats.limit else ""
        command = redrb_command(state.namespace, "set", task.name, *([limit] if limit else []))
        yield FULL_TASK.found(subject_of(task), summary, command)


def _taken(state: State, task: TaskState, group: ConsumerGroupState) -> Iterator[Finding]:
    """Find consumer groups from which nobody takes."""
    waiting = group.stats.ledger.waiting
    if not waiting or _takers(task, group):
        return
    name = "" if group is task.main else f" of consumer group {group.name}"
    summary = f"{counted(waiting, 'group')}{name} wait, and no consumer is alive."
    if _has_makers(task):
        yield NOBODY_TAKES.found(subject_of(task), summary, worker_command(state, task, "trainer"))
    else:
        yield IDLE_TASK.found(subject_of(task), summary, worker_command(state, task, "trainer"))


def _dead_letters(state: State, task: TaskState) -> Iterator[Finding]:
    stats = task.main.stats if task.main else None
    letters = stats.dead_letters if stats else 0
    if not letters:
        return
    given = number_of(task, "max_dead")
    most = DEFAULT_MAX_DEAD if given is None else given
    rate = task.rates.dead if task.rates else 0.0
    text = f"It holds {counted(letters, 'dead letter')}"
    if most and letters >= most:
        kind, text = FULL_DEAD_LETTERS, f"{text}, and max_dead is {most:,}."
    elif rate > 0:
        kind, text = GROWING_DEAD_LETTERS, f"{text}, {rate:.2g} more each second."
    else:
        kind, text = DEAD_LETTERS, f"{text}."
    yield kind.found(
        subject_of(task), text, redrb_command(state.namespace, "dead", "ls", task.name)
    )


def _ledger(state: State, task: TaskState) -> Iterator[Finding]:
    command = redrb_command(state.namespace, "save", task.name, f"{task.name}.redrb")
    for group in task.groups:
        ledger = group.stats.ledger
        if not ledger.balanced:
            ended = ledger.acked + ledger.expired + ledger.filtered + ledger.evicted + ledger.dead
            yield UNBALANCED_LEDGER.found(
                subject_of(task),
                f"Of {ledger.put:,} groups put, consumer group {group.name} has ended {ended:,}, "
                f"leases {ledger.leased:,} and has {ledger.waiting:,} that wait: "
                f"{ledger.put - ended - ledger.leased - ledger.waiting:+,} are not accounted for.",
                command,
            )
    stats = task.main.stats if task.main else None
    if stats and stats.admission and not stats.admission.balanced:
        rights = stats.admission
        yield UNBALANCED_LEDGER.found(
            subject_of(task),
            f"Of {rights.granted:,} rights to begin groups, {rights.used:,} were used, "
            f"{rights.returned:,} returned, {rights.lost:,} lost, and {rights.held:,} are held.",
            command,
        )
    if stats and stats.parts and not stats.parts.balanced:
        yield UNBALANCED_LEDGER.found(
            subject_of(task),
            f"Of {stats.parts.begun:,} groups begun in parts, {stats.parts.groups:,} wait and the "
            "others are not all accounted for.",
            command,
        )
