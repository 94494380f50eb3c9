"""How thorough a run of the benchmark is."""

from __future__ import annotations

from dataclasses import dataclass

ROUND_S = 4.0


@dataclass(frozen=True)
class Options:
    """Choices that all sections share.

    Attributes:
        rounds: Timed rounds of each contestant.
        size: Share of a full round, which takes `ROUND_S`.
        server: Path of the server; None: the one on PATH.
        quick: Leave out the largest cases.
    """

    rounds: int = 5
    size: float = 1.0
    server: str | None = None
    quick: bool = False

    @property
    def round_s(self) -> float:
        """About the seconds of a round of each contestant."""
        return ROUND_S * self.size
