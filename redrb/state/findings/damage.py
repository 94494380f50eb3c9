"""Findings about tasks and weights whose data in Redis is damaged."""

from __future__ import annotations

from collections.abc import Iterator

from redrb.state.finding import Finding, FindingKind
from redrb.state.findings.wording import server_command, url_command
from redrb.state.model import State

FAILED_CHECK = FindingKind(
    "failed-check",
    "critical",
    "A key of redrb has another type or content than it should have: another program changed it. "
    "CLIENT LIST shows which programs are connected. If you have a file of `redrb save`, restore "
    "the task from it.",
)
KINDS = (FAILED_CHECK,)


def find(state: State) -> Iterator[Finding]:
    """Yield the findings about damaged data."""
    words = ("CLIENT", "LIST")
    command = (
        server_command(state.servers[0], *words)
        if state.servers
        else url_command(state.url, state.where, *words)
    )
    for kind, named in (("task", state.tasks), ("weights", state.weights)):
        for each in named:
            if each.damage:
                yield FAILED_CHECK.found(f"{kind} {each.name}", each.damage, command)
