"""The line that says how far a run is."""

from __future__ import annotations

from redrb.launch.history import History
from redrb.stream import StreamStats


def progress_line(seconds: float, history: History, stats: StreamStats | None) -> str:
    """Return the line."""
    reward, newest, quiet_s = history.reward_last, history.staleness_newest, history.quiet_s
    stale = f"{newest[0]:.1f} (max {newest[1]:.0f})" if newest else "..."
    quiet = f", no step for {quiet_s:.0f} s" if quiet_s else ""
    return (
        f"{seconds:5.0f} s  reward {'  ... ' if reward is None else f'{reward:.3f}'}"
        f"  {history.rate:6,.0f} samples/s{quiet}"
        f"  staleness {stale}  weights v{history.weight_version}  {_groups(stats) if stats else ''}"
    ).rstrip()


def _groups(stats: StreamStats) -> str:
    """Return the groups that a user watches: many filtered ones mean that rewards are wrong."""
    ledger = stats.ledger
    filtered = f", {ledger.filtered:,} filtered" if ledger.filtered else ""
    return f"{ledger.waiting:,} waiting, {ledger.leased:,} leased{filtered}"
