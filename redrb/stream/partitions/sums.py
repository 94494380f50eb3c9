"""Ledgers, counters and reports of partitions, added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields

from redrb.experience import Status
from redrb.stream.task.expiration import Staleness, StalenessReport
from redrb.stream.task.ledger import Ledger, StreamStats

_LARGEST = ("joined", "version", "consumers")
"""Counters that are not added: each partition has the same one, or counts the same consumers."""


def summed_stats(parts: Sequence[StreamStats]) -> StreamStats:
    """Return the sum of the partitions' counters.

    Consumer group and weight version are the same in all partitions; a consumer has a heartbeat in
    each partition, so the largest number of consumers counts.
    """
    ledgers = [part.ledger.as_dict() for part in parts]
    ledger = Ledger(**{name: sum(one[name] for one in ledgers) for name in ledgers[0]})
    waiting: Counter[Status] = Counter()
    for part in parts:
        waiting.update(part.waiting)
    counters = {
        field.name: (max if field.name in _LARGEST else sum)(
            getattr(part, field.name) for part in parts
        )
        for field in fields(StreamStats)
        if field.name not in ("ledger", "waiting")
    }
    return StreamStats(ledger=ledger, waiting=dict(waiting), **counters)


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
