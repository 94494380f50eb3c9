"""First in, first out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fifo:
    """Groups in the order of their arrival; those that came back from a lease first.

    Costs nothing at put: arrival is the order in which the stream holds them.
    """

    name: str = "fifo"
