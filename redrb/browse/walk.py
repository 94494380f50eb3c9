"""`Walk`: goes through the groups of all partitions, page by page, within a bound."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from redrb.browse.entries import Browse, Entry, EntryPage
from redrb.stream.task.store import TaskStore


class Walk:
    """One way through the groups of a task.

    Attributes:
        total: Groups of the source, in the pages that were read.
        stores: All partitions.
        cut: Whether the bound ended it before all groups were looked at.
    """

    def __init__(
        self, stores: Sequence[TaskStore], group: str, *, where: str, looks: int, page: int
    ) -> None:
        self.looked = 0
        self.total = 0
        self.cut = False
        self.version: int | None = None
        self.incarnations = [""] * len(stores)
        self.stores = stores
        self._group = group
        self._where = where
        self._looks = looks
        self._page = page

    def given(self, seqs: dict[int, list[int]]) -> dict[tuple[int, int], Entry]:
        """Return groups by partition and number there."""
        found = {}
        for number, wanted in seqs.items():
            page = self._read(number, "given", seqs=wanted)
            for entry in page.entries(number) if page is not None else ():
                found[number, entry.seq] = entry
        return found

    def through(self, *sources: str) -> Iterator[Entry]:
        """Yield the groups of some sources, one source after the other."""
        return chain.from_iterable(map(self._merged, sources))

    def indexed(self, source: str) -> Iterator[Entry] | None:
        """Return the groups of a source; None if the task has no index for it."""
        if self._read(0, source) is None:
            return None
        self.looked = self.total = 0
        return self._merged(source)

    def _merged(self, source: str) -> Iterator[Entry]:
        key = _KEYS.get(source)
        parts = [self.each(number, source) for number in range(len(self.stores))]
        if len(parts) == 1 or key is None:  # by rank: each partition's first, then their second
            ranked = heapq.merge(
                *(enumerate(part) for part in parts), key=lambda pair: (pair[0], pair[1].place)
            )
            return (entry for _, entry in ranked)
        return iter(heapq.merge(*parts, key=key))

    def each(self, number: int, source: str) -> Iterator[Entry]:
        """Yield the groups of a source in one partition."""
        place, first = "", True
        while place or first:
            if self.looked >= self._looks:
                self.cut = True
                return
            page = self._read(number, source, place=place, first=first)
            if page is None:
                return
            yield from page.entries(number)
            place, first = page.place, False

    def _read(
        self,
        number: int,
        source: str,
        *,
        place: str = "",
        seqs: Sequence[int] = (),
        first: bool = True,
    ) -> EntryPage | None:
        named = [str(seq) for seq in seqs]
        browse = Browse(self._group, source, place, self._page, self._where, named)
        page = self.stores[number].call(browse)
        if not page.indexed:
            return None
        self.looked += page.looked
        self.total += page.total if first else 0
        self.incarnations[number] = page.incarnation
        known = [each for each in (self.version, page.version) if each is not None]
        self.version = max(known, default=None)
        return page


_KEYS: dict[str, Callable[[Entry], Any]] = {
    "newest": lambda entry: (-entry.seq, entry.place),
    "history": lambda entry: -entry.ended.timestamp() if entry.ended else 0.0,
    "leased": lambda entry: (entry.seq, entry.place),
    "stalest": lambda entry: (
        entry.version if entry.version is not None else float("inf"),
        entry.seq,
    ),
}
"""Source -> what its groups are sorted by; others are in the order of each partition."""
