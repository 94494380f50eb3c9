"""The troubles that a state shows: `findings_of(state)`.

Top, the page, the exporter and `redrb doctor` show these. docs/doctor.md lists their kinds.
"""

from __future__ import annotations

from itertools import chain

from redrb.state.finding import Finding, FindingKind, worst_first
from redrb.state.findings import (
    accounts,
    connection,
    damage,
    servers,
    staleness,
    tasks,
    weights,
    workers,
)
from redrb.state.findings.connection import connection_finding
from redrb.state.model import State

__all__ = ["KINDS", "connection_finding", "findings_of"]

KINDS: tuple[FindingKind, ...] = (
    *connection.KINDS,
    *damage.KINDS,
    *servers.KINDS,
    *tasks.KINDS,
    *accounts.KINDS,
    *workers.KINDS,
    *staleness.KINDS,
    *weights.KINDS,
)
"""All kinds of findings that need no more than a state."""


def findings_of(state: State) -> tuple[Finding, ...]:
    """Return the troubles that a state shows: the worst first, in the same order at each call."""
    parts = (damage, servers, tasks, accounts, workers, staleness, weights)
    return worst_first(chain.from_iterable(part.find(state) for part in parts))
