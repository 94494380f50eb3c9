"""Names servers that are older than fixes of known security faults."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from redrb.watch.state.findings.wording import server_finding
from redrb.watch.state.model import Finding, ServerState

Line = tuple[int, int]

FIRST_WITHOUT_DISTRIBUTION: Line = (8, 2)
"""Distributions patch the lines before this one."""


@dataclass(frozen=True, slots=True)
class SecurityFix:
    """A security fault of servers.

    Attributes:
        fixed: First patch with the fix, by line of versions: {(8, 2): 6} is 8.2.6. Lines between
            these have no release with the fix, and later ones have it from their first release.
    """

    number: str
    fixed: Mapping[Line, int]
    since: Line = (7, 0)

    def is_in(self, line: Line, patch: int) -> bool:
        """Return whether a version has the fault."""
        if line in self.fixed:
            return patch < self.fixed[line]
        return self.since <= line < max(self.fixed)


_REDIS_IN_MAY = {(7, 2): 14, (7, 4): 9, (8, 2): 6, (8, 4): 3, (8, 6): 3, (8, 8): 0}
_REDIS_IN_JULY = {(7, 2): 15, (7, 4): 10, (8, 2): 8, (8, 4): 5, (8, 6): 5, (8, 8): 0}
_REDIS_IN_AUGUST = {(7, 2): 16, (7, 4): 11, (8, 2): 9, (8, 4): 6, (8, 6): 6, (8, 8): 2, (8, 10): 1}
_VALKEY_IN_MAY = {(7, 2): 13, (8, 0): 8, (8, 1): 7, (9, 0): 4, (9, 1): 0}
_VALKEY_IN_JULY = {(7, 2): 14, (8, 0): 10, (8, 1): 9, (9, 0): 5, (9, 1): 1}

FAULTS: Mapping[str, tuple[SecurityFix, ...]] = {
    "redis": (
        SecurityFix("CVE-2026-23479", _REDIS_IN_MAY, since=(7, 2)),
        SecurityFix("CVE-2026-23631", _REDIS_IN_MAY),
        SecurityFix("CVE-2026-25243", _REDIS_IN_MAY),
        SecurityFix("CVE-2026-66373", _REDIS_IN_JULY),
        SecurityFix("CVE-2026-81934 (with TLS)", _REDIS_IN_AUGUST),
    ),
    # Valkey has numbers of its own for two of them
    "valkey": (
        SecurityFix("CVE-2026-23479", _VALKEY_IN_MAY),
        SecurityFix("CVE-2026-23631", _VALKEY_IN_MAY),
        SecurityFix("CVE-2026-25243", _VALKEY_IN_MAY),
        SecurityFix("CVE-2026-63639 (of Redis: CVE-2026-66373)", _VALKEY_IN_JULY),
        SecurityFix("CVE-2026-56684 (with TLS; of Redis: CVE-2026-81934)", _VALKEY_IN_JULY),
    ),
}
"""The faults of each kind of server, from its release notes."""


def find(server: ServerState) -> Iterator[Finding]:
    """Yield the findings about one server's version."""
    numbers = re.fullmatch(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", server.version, re.ASCII)
    if not numbers:
        return
    major, minor, patch = map(int, numbers.groups())
    line = (major, minor)
    faults = [fault for fault in FAULTS[server.kind] if fault.is_in(line, patch)]
    if not faults:
        return
    name = f"{server.kind.capitalize()} {server.version}"
    listed = ", ".join(fault.number for fault in faults)
    advice = _advice(line, faults)
    kind, text = "below-security-fixes", f"It is {name}, without the fixes of {listed}: {advice}."
    if line < FIRST_WITHOUT_DISTRIBUTION:
        kind, text = "unknown-security-fixes", f"It is {name}: check that your distribution's "
        text += f"update is in, which fixes {listed}; or {advice}."
    yield server_finding(kind, server, text, "INFO", "server")


def _advice(line: Line, faults: list[SecurityFix]) -> str:
    fixed = {line: max(fault.fixed.get(line, 0) for fault in faults) for line in faults[-1].fixed}
    nearest = min(other for other in fixed if other >= line)
    return f"upgrade to {nearest[0]}.{nearest[1]}.{fixed[nearest]} or newer"
