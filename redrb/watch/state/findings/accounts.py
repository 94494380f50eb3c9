"""Findings about the accounts of tasks and tables: dead letters, ledgers that do not balance."""

from __future__ import annotations

from collections.abc import Iterator

from redrb.stream.task.settings import DEFAULT_MAX_DEAD
from redrb.watch.state.findings.wording import finding_of, redrb_command, task_finding
from redrb.watch.state.model import Finding, State, TaskState
from redrb.words import counted


def find(state: State) -> Iterator[Finding]:
    """Yield the findings about dead letters and ledgers."""
    for task in state.tasks:
        if task.main is not None and task.main.stats.dead_letters:
            yield _dead_letters(state, task, task.main.stats.dead_letters)
        for text in _imbalances(task):
            words = ("save", task.name, f"{task.name}.redrb")
            yield task_finding("unbalanced-ledger", state, task, text, *words)
    for table in state.tables:
        if not table.balanced:
            text = (
                f"Rows made: {table.made:,}; there: {table.rows:,}; cleared: {table.cleared:,}; "
                f"dropped: {table.dropped:,}."
            )
            command = redrb_command(state, "save", table.name, f"{table.name}.redrb")
            yield finding_of("unbalanced-ledger", f"table {table.name}", text, command)


def _dead_letters(state: State, task: TaskState, letters: int) -> Finding:
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
    return task_finding(kind, state, task, text, "dead", "ls", task.name)


def _imbalances(task: TaskState) -> Iterator[str]:
    for group in task.groups:
        ledger = group.stats.ledger
        if not ledger.balanced:
            ended = ledger.acked + ledger.expired + ledger.filtered + ledger.evicted + ledger.dead
            yield (
                f"Of {ledger.put:,} groups put, consumer group {group.name} has ended {ended:,}, "
                f"leases {ledger.leased:,} and has {ledger.waiting:,} waiting; not accounted for: "
                f"{ledger.put - ended - ledger.leased - ledger.waiting:+,}."
            )
    rights = task.main.stats.admission if task.main else None
    if rights and not rights.balanced:
        yield (
            f"Rights given to begin groups: {rights.granted:,}; used: {rights.used:,}; returned: "
            f"{rights.returned:,}; lost: {rights.lost:,}; held: {rights.held:,}."
        )
    parts = task.main.stats.parts if task.main else None
    if parts and not parts.balanced:
        yield (
            f"Groups begun in parts: {parts.begun:,}; waiting: {parts.groups:,}; the others are "
            "not all accounted for."
        )
