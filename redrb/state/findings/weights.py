"""Findings about weights: expired pins, weights that nobody uses, unreadable ones."""

from __future__ import annotations

from collections.abc import Iterator

from redrb.state.findings.wording import command_line, counted, redrb_command, seconds
from redrb.state.model import Finding, FindingKind, State

LONG_UNUSED_S = 86_400.0

EXPIRED_PINS = FindingKind(
    "expired-pins",
    "info",
    "Readers died while they fetched versions. The next fetch or publish removes these pins.",
    repairs=True,
)
UNUSED_WEIGHTS = FindingKind(
    "unused-weights",
    "info",
    "No worker of the namespace is alive, and nobody fetches these weights: a run has ended, and "
    "its weights fill memory.",
)
UNREADABLE_WEIGHTS = FindingKind(
    "unreadable-weights",
    "info",
    "This user of Redis has no right to read the weights.",
)


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
            yield UNREADABLE_WEIGHTS.found(subject, "The weights could not be read.", command)
            continue
        if weights.expired_pins:
            text = f"{counted(weights.expired_pins, 'pin')} of readers that died."
            yield EXPIRED_PINS.found(subject, text, redrb_command(state, "doctor", "--repair"))
        old = weights.version > 0 and weights.pins == 0 and weights.age_s >= LONG_UNUSED_S
        if unused and old:
            yield UNUSED_WEIGHTS.found(
                subject,
                f"{counted(weights.versions, 'version')} with "
                f"{weights.stored_bytes / 1e6:,.1f} MB; the newest was published "
                f"{seconds(weights.age_s)} ago.",
                redrb_command(state, "weights", "rm", weights.name),
            )
