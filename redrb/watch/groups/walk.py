"""`Walk`: goes through the groups of all partitions, page by page, within a bound."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from redrb.connection.transport import Pipeline
from redrb.stream.task.entries import Numbering, entry_id, parse_entry
from redrb.stream.task.store import TaskStore
from redrb.watch.groups.calls import Browse, BrowsedPage
from redrb.watch.groups.records import GroupView

_REQUEST_GROUPS: Final = 32
_REQUEST_BYTES: Final = 8 << 20
"""Groups, and their bytes, that one request reads; a single group may be larger."""


class Walk:
    """One way through the groups of a task.

    Attributes:
        total: Groups of the source, in the pages that were read.
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
        self.numbering = Numbering(len(stores))
        self._group = group
        self._where = where
        self._looks = looks
        self._page = page

    def given(self, ids: Sequence[int]) -> dict[int, GroupView]:
        """Return groups by their ids."""
        found = {}
        for number, wanted in self.numbering.by_partition(ids).items():
            page = self._read(number, "given", seqs=[seq for seq in wanted if seq > 0])
            for view in page.views(self.numbering, number) if page is not None else ():
                found[view.id] = view
        return found

    def indexed(self, source: str) -> Iterator[GroupView] | None:
        """Return the groups of a source; None if the task has no index for it."""
        if self._read(0, source) is None:
            return None
        self.looked = self.total = 0
        return self.through(source)

    def through(self, source: str) -> Iterator[GroupView]:
        """Return the groups of a source."""
        key = _KEYS.get(source)
        parts = [self.each(number, source) for number in range(len(self.stores))]
        if len(parts) == 1 or key is None:  # by rank: each partition's first, then their second
            ranked = heapq.merge(*map(enumerate, parts), key=lambda pair: pair[0])
            return (view for _, view in ranked)
        return iter(heapq.merge(*parts, key=lambda view: key(view, self.numbering.seq(view.id))))

    def each(self, number: int, source: str) -> Iterator[GroupView]:
        """Yield the groups of a source in one partition."""
        place, first = "", True
        while place or first:
            if self.looked >= self._looks:
                self.cut = True
                return
            page = self._read(number, source, place)
            if page is None:
                return
            yield from page.views(self.numbering, number)
            place, first = page.place, False

    def _read(
        self, number: int, source: str, place: str = "", seqs: Sequence[int] = ()
    ) -> BrowsedPage | None:
        named = [str(seq) for seq in seqs]
        browse = Browse(self._group, source, place, self._page, self._where, named)
        page = self.stores[number].call(browse)
        if not page.indexed:
            return None
        self.looked += page.looked
        self.total += 0 if place else page.total
        self.incarnations[number] = page.incarnation
        known = [each for each in (self.version, page.version) if each is not None]
        self.version = max(known, default=None)
        return page

    def payloads(
        self, views: Iterable[GroupView], most_bytes: int
    ) -> Iterator[tuple[GroupView, bytes | None]]:
        """Yield groups with their bytes, a few read at a time; None for those that are gone.

        Those of more than `most_bytes` are not read.
        """
        batch: list[GroupView] = []
        for view in views:
            nbytes = sum(each.size for each in batch) + view.size
            if batch and (len(batch) >= _REQUEST_GROUPS or nbytes > _REQUEST_BYTES):
                yield from self._payloads(batch, most_bytes)
                batch = []
            batch.append(view)
        yield from self._payloads(batch, most_bytes)

    def _payloads(
        self, batch: Sequence[GroupView], most_bytes: int
    ) -> Iterator[tuple[GroupView, bytes | None]]:
        small = [view.id for view in batch if not view.damaged and view.size <= most_bytes]
        found: dict[int, bytes | None] = {}
        for number, seqs in self.numbering.by_partition(small).items():
            store, pipeline = self.stores[number], Pipeline()
            for seq in seqs:
                pipeline.add("XRANGE", store.keys.stream, entry_id(seq), entry_id(seq))
            pipeline.add("HGET", store.keys.task, "incarnation")
            *replies, now = store.exchange(pipeline)
            if (now or b"").decode(errors="replace") == self.incarnations[number]:
                entries = [parse_entry(reply[0]) for reply in replies if reply]
                found |= {self.numbering.ids(number, [seq])[0]: blob for seq, blob in entries}
        return ((view, found.get(view.id)) for view in batch)


_KEYS: dict[str, Callable[[GroupView, int], Any]] = {
    "newest": lambda _, seq: -seq,
    "leased": lambda _, seq: seq,
    "stalest": lambda view, seq: (
        float("inf") if view.oldest_version is None else view.oldest_version,
        seq,
    ),
}
"""Source -> what its groups are sorted by; others are in the order of each partition."""
