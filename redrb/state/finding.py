"""`Finding`: one trouble, with its cause and the command that helps; `FindingKind`. Pure data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

Severity: TypeAlias = Literal["critical", "warning", "info"]
"""critical: data is lost or nothing goes on; warning: near to that, or a waste; info: a note."""

SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")


@dataclass(frozen=True, slots=True)
class Finding:
    """One trouble.

    Attributes:
        code: Name of the check, such as "dead-worker"; documented in docs/doctor.md.
        severity: How bad it is.
        subject: What it is about: "task math", "maker host-1 of math", "server", "weights actor".
        summary: What was seen, in one sentence with its figures.
        cause: Why this happens, or may happen.
        command: The command that mends it; where no command can, one that shows more.
        repairs: Whether `redrb doctor --repair` does it.
    """

    code: str
    severity: Severity
    subject: str
    summary: str
    cause: str
    command: str
    repairs: bool = False


@dataclass(frozen=True, slots=True)
class FindingKind:
    """All findings of one check: what they have in common.

    Attributes:
        code: Name of the check.
        severity: How bad it is.
        cause: Why this happens, or may happen, and what follows from it.
        repairs: Whether `redrb doctor --repair` mends it.
    """

    code: str
    severity: Severity
    cause: str
    repairs: bool = False

    def found(self, subject: str, summary: str, command: str) -> Finding:
        """Return a finding of this kind."""
        return Finding(
            self.code, self.severity, subject, summary, self.cause, command, self.repairs
        )


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings by severity; those of one severity stay in their order."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))
