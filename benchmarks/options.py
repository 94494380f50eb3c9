"""How thorough a run of the benchmark is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROUND_S = 4.0


@dataclass(frozen=True)
class Options:
    """Choices that all sections share.

    Attributes:
        rounds: Timed rounds of each contestant.
        size: Share of a full round, which takes `ROUND_S`.
        server: Path of the server; None: the one on PATH.
        quick: Leave out the largest cases.
        vllm: A folder with bin/vllm, beside which redrb is installed, and a model; None: none.
    """

    rounds: int = 5
    size: float = 1.0
    server: str | None = None
    quick: bool = False
    vllm: Path | None = None

    @property
    def round_s(self) -> float:
        """About the seconds of a round of each contestant."""
        return ROUND_S * self.size
