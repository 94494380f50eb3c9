"""Findings about weights: expired pins, weights that nobody uses, unreadable ones."""

from __future__ import annotations

from collections.abc import Iterator

from redrb.state.findings.wording import command_line, counted, finding_of, redrb_command, seconds
from redrb.state.model import Finding, State

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
            yield finding_of(
                "unreadable-weights", subject, "The weights could not be read.", command
            )
            continue
        if weights.expired_pins:
            text = f"{counted(weights.expired_pins, 'pin')} of readers that died."
            yield finding_of(
                "expired-pins", subject, text, redrb_command(state, "doctor", "--repair")
            )
        old = weights.version > 0 and weights.pins == 0 and weights.age_s >= LONG_UNUSED_S
        if unused and old:
            yield finding_of(
                "unused-weights",
                subject,
                f"{counted(weights.versions, 'version')} with "
                f"{weights.stored_bytes / 1e6:,.1f} MB; the newest was published "
                f"{seconds(weights.age_s)} ago.",
                redrb_command(state, "weights", "rm", weights.name),
            )
