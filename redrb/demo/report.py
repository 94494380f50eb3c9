"""The report of a run: a table, a curve and one line of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from redrb.demo.history import History
from redrb.stream import StreamStats

_REMARKS = {
    "waiting": ", made but not trained by the end",
    "expired": ", made and too stale to be trained",
}
"""Remarks beside figures of the ledger."""


def summary(seconds: float, history: History, stats: StreamStats) -> dict[str, Any]:
    """Return the figures of a run, as `--json` prints them."""
    return {
        "reward_first": history.reward_first,
        "reward_last": history.reward_last,
        "seconds": round(seconds, 2),
        "samples": history.samples,
        "samples_per_second": round(history.samples / seconds, 1),
        "staleness_mean": round(history.staleness_mean, 3),
        "staleness_max": history.staleness_max,
        "weight_versions": history.weight_version,
        "weight_versions_by_kind": dict(history.versions_by_kind),
        "weights_bytes_full": history.weights_bytes_full,
        "weights_bytes_sent": history.weights_bytes_sent,
        "trainer_wait_share": round(history.trainer_wait_share, 4),
        "maker_admission_share": round(history.maker_admission_share, 4),
        "maker_send_share": round(history.maker_send_share, 4),
        "maker_room_share": round(history.maker_room_share, 4),
        "ledger": stats.ledger.as_dict(),
        "ledger_balanced": stats.ledger.balanced,
    }


def table(figures: Mapping[str, Any], history: History, stats: StreamStats) -> Table:
    """Return the figures of a run as a table."""
    shown = Table(title="what happened", title_justify="left", show_header=False)
    shown.add_column(style="dim")
    shown.add_column(justify="right")
    for name, value in (
        ("held-out reward before", f"{figures['reward_first']:.3f}"),
        ("held-out reward after", f"[bold]{figures['reward_last']:.3f}[/bold]"),
        ("seconds", f"{figures['seconds']:.1f}"),
        ("samples trained", f"{figures['samples']:,}"),
        ("samples a second", f"{figures['samples_per_second']:,.0f}"),
        ("optimizer steps", f"{history.steps:,}"),
        ("weight versions published", f"{figures['weight_versions']:,}"),
        ("of them in full / as deltas", _by_kind(history)),
        ("bytes of weights in full / sent", _sent(history)),
        (
            "staleness, mean / max versions",
            f"{figures['staleness_mean']:.2f} / {figures['staleness_max']}",
        ),
        ("trainer waited for data, of its time", f"{figures['trainer_wait_share']:.1%}"),
        ("makers waited to begin groups", f"{figures['maker_admission_share']:.1%}"),
        ("makers sent, of their time", f"{figures['maker_send_share']:.1%}"),
        ("of it, waited for the trainer", f"{figures['maker_room_share']:.1%}"),
        ("bytes a sample in Redis", f"{stats.bytes_put / max(1, stats.samples_put):,.0f}"),
    ):
        shown.add_row(name, value)
    shown.add_section()
    for name, count in stats.ledger.as_dict().items():
        shown.add_row(f"groups {name}{_REMARKS.get(name, '')}", f"{count:,}")
    balanced = "[green]yes[/green]" if stats.ledger.balanced else "[red]NO[/red]"
    shown.add_row("ledger balanced", balanced)
    return shown


def _by_kind(history: History) -> str:
    kinds = history.versions_by_kind
    return f"{kinds['full']:,} / {kinds['delta']:,}"


def _sent(history: History) -> str:
    full, sent = history.weights_bytes_full, history.weights_bytes_sent
    return f"{full / 1e6:,.1f} MB / {sent / 1e6:,.1f} MB"


def draw_curve(path: Path, history: History, *, workers: str) -> None:
    """Draw held-out reward and staleness over time to a PNG file, with `workers` in its title."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 5.5), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    above.plot(*zip(*history.rewards, strict=True), marker="o", markersize=4, color="tab:blue")
    above.set(ylabel="held-out reward\n(exact match)", ylim=(0, 1.02))
    above.set_title(f"redrb demo: {workers}", loc="left")
    if history.ages:
        seconds, mean, largest = zip(*history.ages, strict=True)
        below.fill_between(seconds, largest, color="tab:orange", alpha=0.25, label="max", lw=0)
        below.plot(seconds, mean, color="tab:orange", lw=1, label="mean")
        below.legend(loc="lower right", ncols=2, frameon=False, bbox_to_anchor=(1, 0.98))
    below.set(ylabel="staleness\n(weight versions)", xlabel="seconds since training began")
    below.set_ylim(bottom=0)
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
