"""Findings about a task's account of its groups: dead letters, ledgers that do not balance."""

from __future__ import annotations

from collections.abc import Iterator

from redrb.state.findings.wording import counted, redrb_command, subject_of
from redrb.state.model import Finding, FindingKind, State, TaskState
from redrb.stream.task.settings import DEFAULT_MAX_DEAD

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
    "good. redrb dead requeue lets them wait again, redrb dead drop deletes them; redrb set TASK "
    "max_dead=N keeps more.",
)
DEAD_LETTERS = FindingKind(
    "dead-letters",
    "warning",
    "A trainer or a stage rejected these groups, or their delivery failed max_deliveries times. "
    "They are not trained until they are requeued. Look at them, and mend what failed; then redrb "
    "dead requeue lets them wait again, and redrb dead drop deletes them.",
)


def find(state: State) -> Iterator[Finding]:
    """Yield the findings about dead letters and ledgers."""
    for task in state.tasks:
        if task.readable:
            yield from _dead_letters(state, task)
            yield from _ledger(state, task)


def _dead_letters(state: State, task: TaskState) -> Iterator[Finding]:
    stats = task.main.stats if task.main else None
    letters = stats.dead_letters if stats else 0
    if not letters:
        return
    given = task.number("max_dead")
    most = DEFAULT_MAX_DEAD if given is None else given
    rate = task.rates.dead if task.rates else 0.0
    text = f"It holds {counted(letters, 'dead letter')}"
    if most and letters >= most:
        kind, text = FULL_DEAD_LETTERS, f"{text}, and max_dead is {most:,}."
    elif rate > 0:
        kind, text = GROWING_DEAD_LETTERS, f"{text}, {rate:.2g} more each second."
    else:
        kind, text = DEAD_LETTERS, f"{text}."
    yield kind.found(subject_of(task), text, redrb_command(state, "dead", "ls", task.name))


def _ledger(state: State, task: TaskState) -> Iterator[Finding]:
    command = redrb_command(state, "save", task.name, f"{task.name}.redrb")
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
