"""`Finding`: one trouble, with its cause and the command that helps. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Severity: TypeAlias = Literal["critical", "warning", "info"]
"""critical: data is lost or nothing goes on; warning: near to that, or a waste; info: a note."""

SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")


@dataclass(frozen=True, slots=True)
class Finding:
    """One trouble.

    Attributes:
        code: Name of the check, such as "dead-maker"; documented in docs/doctor.md.
        severity: How bad it is.
        subject: What it is about: "task math", "maker host-1 of math", "server", "weights actor".
        summary: What was seen, in one sentence with its figures.
        cause: Why this happens, or may happen.
        command: The command or setting that mends it; "" if nothing needs to be done.
        repairs: Whether `redrb doctor --repair` does it.
    """

    code: str
    severity: Severity
    subject: str
    summary: str
    cause: str
    command: str = ""
    repairs: bool = False
