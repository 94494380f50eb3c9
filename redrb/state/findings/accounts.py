"""Findings about a task's account of its groups: dead letters, ledgers that do not balance."""

from __future__ import annotations

from collections.abc import Iterator

from redrb.state.findings.wording import counted, finding_of, redrb_command, subject_of
from redrb.state.model import Finding, State, TaskState
from redrb.stream.task.settings import DEFAULT_MAX_DEAD


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
        kind, text = "full-dead-letters", f"{text}, and max_dead is {most:,}."
    elif rate > 0:
        kind, text = "growing-dead-letters", f"{text}, {rate:.2g} more each second."
    else:
        kind, text = "dead-letters", f"{text}."
    yield finding_of(kind, subject_of(task), text, redrb_command(state, "dead", "ls", task.name))


def _ledger(state: State, task: TaskState) -> Iterator[Finding]:
    command = redrb_command(state, "save", task.name, f"{task.name}.redrb")
    for group in task.groups:
        ledger = group.stats.ledger
        if not ledger.balanced:
            ended = ledger.acked + ledger.expired + ledger.filtered + ledger.evicted + ledger.dead
            yield finding_of(
                "unbalanced-ledger",
                subject_of(task),
                f"Of {ledger.put:,} groups put, consumer group {group.name} has ended {ended:,}, "
                f"leases {ledger.leased:,} and has {ledger.waiting:,} that wait: "
                f"{ledger.put - ended - ledger.leased - ledger.waiting:+,} are not accounted for.",
                command,
            )
    stats = task.main.stats if task.main else None
    if stats and stats.admission and not stats.admission.balanced:
        rights = stats.admission
        yield finding_of(
            "unbalanced-ledger",
            subject_of(task),
            f"Of {rights.granted:,} rights to begin groups, {rights.used:,} were used, "
            f"{rights.returned:,} returned, {rights.lost:,} lost, and {rights.held:,} are held.",
            command,
        )
    if stats and stats.parts and not stats.parts.balanced:
        yield finding_of(
            "unbalanced-ledger",
            subject_of(task),
            f"Of {stats.parts.begun:,} groups begun in parts, {stats.parts.groups:,} wait and the "
            "others are not all accounted for.",
            command,
        )
