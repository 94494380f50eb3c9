"""The table of staleness: groups by the number of weight versions that they are behind."""

from __future__ import annotations

from rich.text import Text

from redrb.commands.top.columns import Column, fitted
from redrb.commands.top.text import DIM, NOTE, amount, bar, line
from redrb.state.histogram import Histogram, bucket_names
from redrb.state.model import Staleness


def staleness_table(name: str, staleness: Staleness, width: int | None) -> list[Text]:
    """Return the histograms of a consumer group: waiting, leased, and taken groups."""
    histograms = {
        "waiting": staleness.waiting,
        "leased": staleness.leased,
        "taken, ever": staleness.taken,
    }
    columns = [
        Column(f"STALENESS of {name}", 18, left=True),
        Column("mean", 6),
        Column("most", 6, 1),
        *(
            Column(f"{bucket} behind" if not at else bucket, 6 if at else 8, 2 + at)
            for at, bucket in enumerate(bucket_names())
        ),
        Column("unknown", 7, 20),
    ]
    rows = [_row(title, each) for title, each in histograms.items()]
    return fitted(columns, rows, width)


def _row(title: str, histogram: Histogram) -> list[Text]:
    mean = "-" if histogram.mean is None else f"{histogram.mean:.2f}"
    largest = "-" if histogram.largest is None else f"{histogram.largest:,}"
    return [
        line(title + (" (sample)" if histogram.sampled else "")),
        line(mean),
        line(largest),
        *(line((amount(count), NOTE if count else DIM)) for count in histogram.counts),
        line(amount(histogram.unknown)),
    ]


def staleness_bars(histogram: Histogram, width: int) -> list[Text]:
    """Return a line with a bar for each bucket that has groups, and all before it."""
    total = histogram.total
    names = bucket_names()
    last = max((at for at, count in enumerate(histogram.counts) if count), default=-1)
    lines = []
    for at in range(last + 1):
        count = histogram.counts[at]
        share = count / total
        lines.append(
            line(
                f"  {names[at]:>6} behind  ",
                (bar(share, width), NOTE),
                f"  {amount(count)} ({share:.0%})",
            )
        )
    if histogram.unknown:
        lines.append(line(f"  unknown        {amount(histogram.unknown)}"))
    return lines or [line(("  none", DIM))]
