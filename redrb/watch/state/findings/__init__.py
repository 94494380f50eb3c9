"""The troubles that a state shows: `findings_of(state)`.

Top, the page, the exporter and `redrb doctor` show these. docs/reference/findings.md lists their
kinds.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from redrb.watch.state.findings import accounts, servers, staleness, tasks, weights, workers
from redrb.watch.state.findings.servers import connection_finding
from redrb.watch.state.model import SEVERITIES, Finding, State

__all__ = ["connection_finding", "findings_of", "worst_first"]


def findings_of(state: State) -> tuple[Finding, ...]:
    """Return the troubles that a state shows: the worst first, in the same order at each call."""
    parts = (servers, tasks, accounts, workers, staleness, weights)
    return worst_first(chain.from_iterable(part.find(state) for part in parts))


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings by severity; those of one severity stay in their order."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))
