"""`View`: the newest state that an observer has, and how old it is. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from redrb.state.finding import Finding
from redrb.state.model import State


@dataclass(frozen=True, slots=True)
class View:
    """What an observer knows now.

    Attributes:
        state: The newest state; None before the first look succeeded.
        number: Number of looks that succeeded; changes with each new state.
        age_s: Seconds since the newest state was read.
        error: Why the last look failed; "" if it succeeded.
        findings: Troubles that the newest state shows, and the failed look, the worst first.
    """

    state: State | None = None
    number: int = 0
    age_s: float = 0.0
    error: str = ""
    findings: tuple[Finding, ...] = ()
