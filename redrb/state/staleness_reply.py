"""Turns replies about waiting and leased groups into histograms of their staleness."""

from __future__ import annotations

from collections import Counter

from redrb.connection.transport import Reply
from redrb.errors import DecodeError
from redrb.state.histogram import BOUNDS, Histogram
from redrb.stream.task.facts import unpack_facts


def histogram(reply: Reply, version: int | None) -> Histogram:
    """Return the histogram in a reply of `include/staleness_counts.lua`.

    Args:
        reply: The reply.
        version: Newest weight version that the task knows; None: none.
    """
    kind, number, *rest = reply
    if kind == b"facts":
        return _sampled(int(number), rest, version)
    if version is None or not rest[0]:
        return Histogram(unknown=int(number))
    counts = dict(zip(map(int, rest[1::2]), map(int, rest[2::2]), strict=True))
    beyond = counts.pop(BOUNDS[-1] + 1, 0)
    exact = Histogram.of(counts, unknown=int(number))
    if not beyond:
        return exact
    largest = max(BOUNDS[-1] + 1, version - int(float(rest[0])))
    middle = (BOUNDS[-1] + 1 + largest) / 2
    last = Histogram((*[0] * len(BOUNDS), beyond), mean=middle, largest=largest)
    return Histogram.summed([exact, last])


def _sampled(number: int, packed: Reply, version: int | None) -> Histogram:
    """Return the histogram of the groups whose facts were read, of a number of groups."""
    found: Counter[int] = Counter()
    unknown = 0
    for each in packed:
        made_by = _version(each)
        if made_by is None or version is None:
            unknown += 1
        else:
            found[max(0, version - made_by)] += 1
    if not packed:
        return Histogram(unknown=number)
    return Histogram.of(found, unknown=unknown, sampled=number > len(packed))


def _version(packed: bytes | None) -> int | None:
    """Return the version in packed facts; None if there is none, or they are damaged."""
    try:
        version = unpack_facts(packed).get("version") if packed else None
    except DecodeError:
        return None
    return int(version) if isinstance(version, int | float) and abs(version) < 2**53 else None
