"""Failovers to a replica that may lack the last writes of a primary that was killed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Times of CLOCK_MONOTONIC between which the server has done a request."""

    began: float
    ended: float


class Failover(NamedTuple):
    """A promotion of a replica after its primary was killed.

    Attributes:
        since: The replica had all that the primary had done by then.
        until: The primary was dead by then.
    """

    since: float
    until: float


def lost(span: Span, failovers: Sequence[Failover], before: float = float("inf")) -> bool:
    """Return whether a request that no replica confirmed may be lost.

    Args:
        span: When the server has done it.
        failovers: All failovers of the run.
        before: Only failovers that began earlier count.
    """
    return any(
        span.began <= each.until and span.ended >= each.since and each.since < before
        for each in failovers
    )
