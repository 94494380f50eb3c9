"""Finds runs of one value at the starts and ends of samples, such as padding and masks."""

from __future__ import annotations

from itertools import repeat
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from redrb.codec.columns import Places, Spans
from redrb.codec.wire import MIN_RUN, Storage

Runs: TypeAlias = tuple[Storage, Storage, Storage, Storage]
"""For all samples: lengths and values of the runs at their starts, then at their ends."""


def find_runs(flat: Storage, spans: Spans) -> Runs | None:
    """Return the runs of one value at each sample's start and end; None if no sample has any."""
    leads = flat[spans.first] == flat[spans.inward]
    trails = flat[spans.last] == flat[spans.backward]
    if not (leads | trails).any():
        return None
    changes = (flat[1:] != flat[:-1]).tobytes()
    if 1 not in changes and len(spans.long) == len(spans.counts):  # such as a mask of ones
        lead, (trail, trail_value) = spans.counts, _nothing(flat, spans)
        return lead, flat[spans.first], trail, trail_value
    lead, lead_value = _nothing(flat, spans)
    rows, at, end = _some(leads, spans)
    if rows.size:
        change = np.array(list(map(changes.find, repeat(1), at.tolist(), end.tolist())))
        _note(lead, rows, np.where(change < 0, end, change) + 1 - at)
        lead_value[rows] = np.where(lead[rows], flat[at], 0)
        trails &= lead[spans.long] < spans.counts[spans.long]
    trail, trail_value = _nothing(flat, spans)
    rows, at, end = _some(trails, spans)
    if rows.size:
        change = np.array(list(map(changes.rfind, repeat(1), at.tolist(), end.tolist())))
        _note(trail, rows, end - change)
        trail_value[rows] = np.where(trail[rows], flat[end], 0)
    return lead, lead_value, trail, trail_value


def _nothing(flat: Storage, spans: Spans) -> tuple[Places, Storage]:
    """Return lengths and values of runs, all zero."""
    samples = len(spans.counts)
    return np.zeros(samples, np.int64), np.zeros(samples, flat.dtype)


def _some(likely: NDArray[np.bool_], spans: Spans) -> tuple[Places, Places, Places]:
    """Return the likely ones of the long samples, and the first and last element of each."""
    if likely.all():
        return spans.long, spans.first, spans.last
    return spans.long[likely], spans.first[likely], spans.last[likely]


def _note(runs: Places, rows: Places, lengths: Places) -> None:
    lengths[lengths < MIN_RUN] = 0
    runs[rows] = lengths
