"""The figures of a job: a table, and one line of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from redrb.cli.run.history import JobEvents
from redrb.stream import StreamStats

_REMARKS = {
    "waiting": ", made but not trained by the end",
    "expired": ", made and too stale to be trained",
}


def summary(seconds: float, history: JobEvents, stats: StreamStats | None) -> dict[str, Any]:
    """Return the figures of a job, over all its runs, as `--json` prints them."""
    of_all = history.runs_s + seconds
    return {
        "reward_first": history.reward_first,
        "reward_last": history.reward_last,
        "seconds": round(of_all, 2),
        "seconds_of_run": round(seconds, 2),
        "samples": history.samples,
        "samples_per_second": round(history.samples / max(of_all, 1e-9), 1),
        "staleness_mean": round(history.staleness_mean, 3),
        "staleness_max": history.staleness_max,
        "weight_versions": history.weight_version,
        "weight_versions_by_kind": dict(history.versions_by_kind),
        "weights_bytes_full": history.weights_bytes_full,
        "weights_bytes_sent": history.weights_bytes_sent,
        "trainer_wait_share": round(history.trainer_wait_share, 4),
        "maker_admission_share": round(history.share_of_makers(history.admission_s), 4),
        "maker_send_share": round(history.share_of_makers(history.send_s), 4),
        "maker_room_share": round(history.share_of_makers(history.backpressure_s), 4),
        "faults": [
            {"groups": fault.groups, "why": fault.why} for fault in history.costliest_faults
        ],
        "ledger": stats.ledger.as_dict() if stats else None,
        "ledger_balanced": stats.ledger.balanced if stats else None,
    }


def table(figures: Mapping[str, Any], history: JobEvents, stats: StreamStats | None) -> Table:
    """Return the figures of a job as a table."""
    kinds = history.versions_by_kind
    shown = Table(title="what happened", title_justify="left", show_header=False)
    shown.add_column(style="dim")
    shown.add_column(justify="right")
    for name, value in (
        ("reward before", _reward(figures["reward_first"])),
        ("reward after", f"[bold]{_reward(figures['reward_last'])}[/bold]"),
        (
            "seconds of all runs / of this run",
            f"{figures['seconds']:.1f} / {figures['seconds_of_run']:.1f}",
        ),
        ("samples trained", f"{figures['samples']:,}"),
        ("samples a second", f"{figures['samples_per_second']:,.0f}"),
        ("optimizer steps", f"{history.steps:,}"),
        ("weight versions published", f"{figures['weight_versions']:,}"),
        ("of them in full / as deltas", f"{kinds['full']:,} / {kinds['delta']:,}"),
        ("bytes of weights in full / sent", _sent(history)),
        (
            "staleness of trained samples, mean / max",
            f"{figures['staleness_mean']:.2f} / {figures['staleness_max']}",
        ),
        (
            "trainer waited for data, of its time",
            f"{figures['trainer_wait_share']:.1%}" if history.steps else "it got no batch",
        ),
        ("makers waited to begin groups", f"{figures['maker_admission_share']:.1%}"),
        ("makers sent, of their time", f"{figures['maker_send_share']:.1%}"),
        ("of it, waited for the trainer", f"{figures['maker_room_share']:.1%}"),
    ):
        shown.add_row(name, value)
    for fault in history.costliest_faults:
        shown.add_row(Text(f"groups filtered: {fault.why}", style="red"), f"{fault.groups:,}")
    if stats is None:
        return shown
    in_redis = stats.bytes_put / max(1, stats.samples_put)
    shown.add_row("bytes a sample in Redis", f"{in_redis:,.0f}")
    shown.add_section()
    for name, count in stats.ledger.as_dict().items():
        shown.add_row(f"groups {name}{_REMARKS.get(name, '')}", f"{count:,}")
    balanced = "[green]yes[/green]" if stats.ledger.balanced else "[red]NO[/red]"
    shown.add_row("ledger balanced", balanced)
    return shown


def _reward(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3f}"


def _sent(history: JobEvents) -> str:
    full, sent = history.weights_bytes_full, history.weights_bytes_sent
    return f"{full / 1e6:,.1f} MB / {sent / 1e6:,.1f} MB"


def progress_line(seconds: float, history: JobEvents, stats: StreamStats | None) -> str:
    """Return the line."""
    reward, newest, quiet_s = history.reward_last, history.staleness_newest, history.quiet_s
    stale = f"{newest[0]:.1f} (max {newest[1]:.0f})" if newest else "..."
    quiet = f", no step for {quiet_s:.0f} s" if quiet_s else ""
    fault = (
        ""
        if history.rate or not history.newest_fault
        else f"; newest fault: {history.newest_fault}"
    )
    return (
        f"{seconds:5.0f} s  reward {'  ... ' if reward is None else f'{reward:.3f}'}"
        f"  {history.rate:6,.0f} samples/s{quiet}"
        f"  staleness {stale}  weights v{history.weight_version}  {_groups(stats) if stats else ''}"
    ).rstrip() + fault


def _groups(stats: StreamStats) -> str:
    """Return the groups that a user watches: many filtered ones mean that rewards are wrong."""
    ledger = stats.ledger
    filtered = f", {ledger.filtered:,} filtered" if ledger.filtered else ""
    return f"{ledger.waiting:,} waiting, {ledger.leased:,} leased{filtered}"
