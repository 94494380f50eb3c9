"""`Walk`: goes through the groups of a task, page by page, within a bound."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from redrb.connection.transport import Pipeline
from redrb.stream.task.entries import entry_id, parse_entry
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

    def __init__(self, store: TaskStore, group: str, *, where: str, looks: int, page: int) -> None:
        self.looked = 0
        self.total = 0
        self.cut = False
        self.version: int | None = None
        self.incarnation = ""
        self.store = store
        self._group = group
        self._where = where
        self._looks = looks
        self._page = page

    def given(self, ids: Sequence[int]) -> dict[int, GroupView]:
        """Return groups by their ids."""
        page = self._read("given", seqs=[seq for seq in ids if seq > 0])
        return {view.id: view for view in page.views()} if page is not None else {}

    def indexed(self, source: str) -> Iterator[GroupView] | None:
        """Return the groups of a source; None if the task has no index for it."""
        if self._read(source) is None:
            return None
        self.looked = self.total = 0
        return self.through(source)

    def through(self, source: str) -> Iterator[GroupView]:
        """Yield the groups of a source."""
        place, first = "", True
        while place or first:
            if self.looked >= self._looks:
                self.cut = True
                return
            page = self._read(source, place)
            if page is None:
                return
            yield from page.views()
            place, first = page.place, False

    def _read(self, source: str, place: str = "", seqs: Sequence[int] = ()) -> BrowsedPage | None:
        named = [str(seq) for seq in seqs]
        browse = Browse(self._group, source, place, self._page, self._where, named)
        page = self.store.call(browse)
        if not page.indexed:
            return None
        self.looked += page.looked
        self.total += 0 if place else page.total
        self.incarnation = page.incarnation
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
        if small:
            pipeline = Pipeline()
            for seq in small:
                pipeline.add("XRANGE", self.store.keys.stream, entry_id(seq), entry_id(seq))
            pipeline.add("HGET", self.store.keys.task, "incarnation")
            *replies, now = self.store.exchange(pipeline)
            if (now or b"").decode(errors="replace") == self.incarnation:
                found = dict(parse_entry(reply[0]) for reply in replies if reply)
        return ((view, found.get(view.id)) for view in batch)
