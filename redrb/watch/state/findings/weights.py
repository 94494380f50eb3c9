"""Findings about weights: damaged ones, expired pins, weights that nobody uses, unreadable ones."""

from __future__ import annotations

from collections.abc import Iterator

from redrb.watch.state.findings.wording import (
    command_line,
    finding_of,
    redrb_command,
    seconds,
    shown,
)
from redrb.watch.state.model import Finding, State
from redrb.words import counted

LONG_UNUSED_S = 86_400.0


def find(state: State) -> Iterator[Finding]:
    """Yield the findings about weights."""
    workers = (worker for task in state.tasks for worker in task.workers)
    unused = not any(worker.alive for worker in workers)
    for weights in state.weights:
        subject = f"weights {weights.name}"
        if weights.damage:
            continue
        if not weights.readable:
            words = ("redrb", "acl", "--role=observer", "--task=TASK", f"--weights={weights.name}")
            command = command_line(words, namespace=state.namespace)
            text = "The weights could not be read."
            yield finding_of("unreadable-weights", subject, text, command)
            continue
        if weights.asked_version:
            key = shown(weights.asked_key, longest=300)
            text = f"A reader found version {weights.asked_version} damaged, in {key}."
            command = redrb_command(state, "weights", "ls")
            yield finding_of("damaged-weights", subject, text, command)
        if weights.expired_pins:
            text = f"{counted(weights.expired_pins, 'pin')} of readers that died."
            command = redrb_command(state, "doctor", "--repair")
            yield finding_of("expired-pins", subject, text, command)
        old = weights.version > 0 and weights.pins == 0 and weights.age_s >= LONG_UNUSED_S
        if unused and old:
            stored = f"{counted(weights.versions, 'version')}, {weights.stored_bytes / 1e6:,.1f} MB"
            text = f"{stored}; the newest was published {seconds(weights.age_s)} ago."
            command = redrb_command(state, "weights", "rm", weights.name)
            yield finding_of("unused-weights", subject, text, command)
