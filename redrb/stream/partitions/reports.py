"""`summed_reports`: how stale the groups of all partitions are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields

from redrb.stream.task.expiration import Staleness, StalenessReport


def summed_reports(parts: Sequence[StalenessReport]) -> StalenessReport:
    """Return the sum of the partitions' histograms of staleness."""
    names = [field.name for field in fields(StalenessReport) if field.name != "current_version"]
    version = max(part.current_version for part in parts)
    return StalenessReport(
        version, *(_histogram(getattr(part, name) for part in parts) for name in names)
    )


def _histogram(parts: Iterable[Staleness]) -> Staleness:
    groups: Counter[int] = Counter()
    for part in parts:
        groups.update(part.histogram)
    return Staleness(dict(groups))
