"""Places in queues whose processes do not look any more."""

from __future__ import annotations

from collections.abc import Iterator

from redrb.doctor.examination import Examination
from redrb.state.findings.wording import counted, redrb_command
from redrb.state.model import Finding, FindingKind, State

STUCK_WAITERS = FindingKind(
    "stuck-waiters",
    "info",
    "Processes died, or were stopped, while they waited. The next process that passes the queue "
    "removes them; until then the figures of waiting puts and takes are too large.",
)


def find(state: State, examined: Examination) -> Iterator[Finding]:
    """Yield the findings about queues."""
    takes = sum(group.stuck_takes for group in examined.consumer_groups)
    numbers = (
        (examined.stuck_puts, "put"),
        (takes, "take"),
        (examined.stuck_admissions, "request for rights"),
    )
    texts = [counted(number, noun) for number, noun in numbers[:2] if number]
    if examined.stuck_admissions:
        texts.append(f"{examined.stuck_admissions:,} for rights")
    if texts:
        yield STUCK_WAITERS.found(
            examined.subject,
            f"In the queues, of processes that do not look any more: {', '.join(texts)}.",
            redrb_command(state, "stats", examined.store.task),
        )
