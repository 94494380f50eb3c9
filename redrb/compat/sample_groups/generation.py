"""`Generation`: the groups that are being generated, each an entry of a task until it is finished.

A group of the data set is an entry of the task of prompts from its first `hand_out` until it is
finished, whatever happens meanwhile: it leaves by one `lease.forward` to the finished groups, and
so it is finished once. What is generated of an aborted group is kept beside its entry, in the task
of returned groups, with the entry in the tag `of`. Returned groups that have no such entry, as
those that miles recycles, are entries of the task of returned groups themselves; their tag is 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from redrb.compat.sample_groups.packing import FORMAT, group_index, number, pack_group
from redrb.errors import BatchTimeout, LeaseLost, StoreUnavailable
from redrb.experience import BufferItem
from redrb.stream import ExperienceStream, Lease
from redrb.stream.task.queries import MOST_VALUES
from redrb.unpacking import Reading

_log = logging.getLogger("redrb")

_FIRST_NUMBER = 1 << 41
"""First number of returned groups that have none."""

_ENTRIES = {"of": 0}
_CONTENTS = {"of_ne": 0}


class HandedOut(NamedTuple):
    """A group that is being generated.

    Attributes:
        lease, id, stream: Its entry.
        saves: The saves before it was handed out.
        content: The lease on what was generated of it before, and the id there.
    """

    lease: Lease
    id: int
    stream: ExperienceStream
    saves: int = 0
    content: tuple[Lease, int] | None = None


class Generation:
    """Groups of a job from the data set to the finished ones, as one process has them.

    Args:
        unpack: Returns the group of stored items.
    """

    def __init__(
        self,
        prompts: ExperienceStream,
        returned: ExperienceStream,
        finished: ExperienceStream,
        unpack: Callable[[Sequence[BufferItem]], list[Any]],
    ) -> None:
        self.prompts, self.returned, self._finished = prompts, returned, finished
        self._unpack = unpack
        self._handed: dict[int | None, HandedOut] = {}  # by group_index
        self._saves = 0
        self._finishes = False

    def hand_out(self, count: int, prompt: Callable[[int], list[Any]]) -> list[list[Any]]:
        """Return groups to generate: those begun before, then new ones, which `prompt` makes."""
        groups: list[list[Any]] = []
        while True:
            found: list[tuple[list[Any], HandedOut]] = []
            for seq, items, lease in self._take(self.returned, count - len(groups), _ENTRIES):
                group = self._unpack(items)
                number(group, _FIRST_NUMBER + seq)
                found.append((group, HandedOut(lease, seq, self.returned)))
            for seq, items, lease in self._take(self.prompts, count - len(groups) - len(found)):
                found.append((prompt(_place(items)), HandedOut(lease, seq, self.prompts)))
            groups += self._note(found)
            if len(groups) >= count:
                return groups
            self.prompts.store_next(_entry_at, count - len(groups))

    def give_back(self, groups: Sequence[Sequence[Any]]) -> None:
        """Store groups that `hand_out` returns again, with what is generated of them."""
        for group in groups:
            items, name = pack_group(group), group_index(group)
            entry = self._handed.get(name)
            if entry is None:
                self.returned.put(_tagged(items, 0))
            elif entry.stream is self._finished:
                forward(entry.lease, self.returned, {entry.id: _tagged(items, 0)})
            else:
                self.returned.put(_tagged(items, _entry_of(entry)))
                self._end_content(entry)
                release(entry.lease, [entry.id])
            self._handed.pop(name, None)

    def finish(
        self,
        groups: Sequence[tuple[Sequence[Any], list[BufferItem]]],
        timeout: float | None = None,
    ) -> None:
        """Store finished groups, each with its items."""
        self._finishes = True
        handed: dict[Lease, dict[int, list[BufferItem]]] = {}
        for group, items in groups:
            entry = self._handed.get(group_index(group))
            if entry is not None and entry.id in entry.lease.ids:
                handed.setdefault(entry.lease, {})[entry.id] = items
        others = [items for group, items in groups if group_index(group) not in self._handed]
        if others:
            self._finished.put_many(others, timeout=timeout)
        for lease, chosen in handed.items():
            forward(lease, self._finished, chosen, timeout=timeout)
        for group, _ in groups:
            self._end_content(self._handed.pop(group_index(group), None))

    def drop(self, group: Sequence[Any]) -> None:
        """End a group that is not to be trained; it counts as filtered."""
        entry = self._handed.pop(group_index(group), None)
        if entry is not None:
            forward(entry.lease, self._finished, {entry.id: None})
            self._end_content(entry)

    def recycling(self, group: Sequence[Any], lease: Lease, seq: int) -> None:
        """Note that a finished group is not trained: `give_back` or `drop` ends it."""
        self._handed[group_index(group)] = HandedOut(lease, seq, self._finished, self._saves)

    def recycled(self, group: Sequence[Any]) -> bool:
        """Whether `give_back` has ended a group that was noted; it is not noted any more."""
        return self._handed.pop(group_index(group), None) is None

    def save(self) -> None:
        """End groups that a filter has dropped: neither finished nor given back by now.

        Where groups are finished here, they have until the second save after they were handed out.
        """
        last = self._saves - 1 if self._finishes else self._saves
        self._saves += 1
        for name, entry in list(self._handed.items()):
            if entry.saves <= last:
                acknowledge(entry.lease, entry.stream, [entry.id])
                self._end_content(self._handed.pop(name, None))

    def load(self) -> None:
        """Requeue all groups, and end contents whose entries are gone."""
        release_all(entry.lease for entry in self._handed.values())
        release_all(entry.content[0] for entry in self._handed.values() if entry.content)
        self._handed.clear()
        orphans = list(self._take(self.returned, self.returned.count(where=_CONTENTS), _CONTENTS))
        for seq, items, lease in orphans:
            of = int(items[0].tags.get("of", 0))
            stream = self.prompts if of > 0 else self.returned
            if stream.read([abs(of)]) == [None]:
                acknowledge(lease, self.returned, [seq])
            else:
                release(lease, [seq])

    def _take(
        self, stream: ExperienceStream, count: int, where: Mapping[str, Any] | None = None
    ) -> Iterator[tuple[int, list[BufferItem], Lease]]:
        waiting = min(count, stream.count(where=where)) if count else 0
        if waiting:
            try:
                lease = stream.take(waiting, timeout=0, at_least=1, where=where)
            except (BatchTimeout, StoreUnavailable):
                return  # other processes took them; or the next call waits until Redis is back
            for seq, items in zip(lease.ids, lease.groups(), strict=True):
                yield seq, items, lease

    def _note(self, found: Sequence[tuple[list[Any], HandedOut]]) -> list[list[Any]]:
        """Note entries that are handed out; returns their groups, as generated before."""
        groups = []
        contents = self._contents_of([entry for _, entry in found])
        for first, entry in found:
            group, content = first, None
            for seq, items, lease in contents.get(_entry_of(entry), ()):
                if content is not None:  # a process died before it had ended this one
                    acknowledge(content[0], self.returned, [content[1]])
                group, content = self._unpack(items), (lease, seq)
            self._handed[group_index(group)] = entry._replace(saves=self._saves, content=content)
            groups.append(group)
        return groups

    def _contents_of(
        self, entries: Sequence[HandedOut]
    ) -> dict[int, list[tuple[int, list[BufferItem], Lease]]]:
        """Lease what was generated of entries, by entry: of all with one look at what is stored."""
        found: dict[int, list[tuple[int, list[BufferItem], Lease]]] = {}
        most = self.returned.count(where=_CONTENTS) if entries else 0
        names = [_entry_of(entry) for entry in entries] if most else []
        for first in range(0, len(names), MOST_VALUES):
            where = {"of": {"$in": names[first : first + MOST_VALUES]}}
            for each in self._take(self.returned, most, where):
                found.setdefault(int(each[1][0].tags["of"]), []).append(each)
        return found

    def _end_content(self, entry: HandedOut | None) -> None:
        if entry is not None and entry.content is not None:
            lease, seq = entry.content
            acknowledge(lease, self.returned, [seq])


def _entry_at(number: int) -> list[BufferItem]:
    """Return the entry of a place in the data set, counted from 1."""
    return [BufferItem(None, None, extras={"format": FORMAT, "place": number - 1})]


def _place(items: Sequence[BufferItem]) -> int:
    with Reading("the place of a prompt"):
        place = items[0].extras["place"]
        if type(place) is not int or place < 0:
            raise ValueError(f"{place!r:.40} is no place")
        return place


def _entry_of(entry: HandedOut) -> int:
    """Return the tag of what is generated of an entry; entries of returned groups are negative."""
    return entry.id if entry.stream.task.endswith(".prompts") else -entry.id


def _tagged(items: list[BufferItem], of: int) -> list[BufferItem]:
    for item in items:
        item.tags = {"of": of}
    return items


def acknowledge(lease: Lease, stream: ExperienceStream, ids: Sequence[int] | None = None) -> None:
    """Acknowledge groups of a lease, also those that were lost and wait again.

    Args:
        ids: The groups; default: all.
    """
    layouts = lease.layouts
    chosen = layouts if ids is None else ids
    samples = {seq: layouts[seq].samples for seq in chosen if seq in layouts}
    try:
        if samples:
            lease.ack(list(samples))
    except LeaseLost:
        stream.settle(samples, incarnation=lease.incarnation)


def release(lease: Lease, ids: Sequence[int] | None = None) -> None:
    """Requeue groups of a lease."""
    try:
        if lease:
            lease.release(ids)
    except LeaseLost as error:  # they wait again already
        _log.warning("%s", error)


def release_all(leases: Iterable[Lease]) -> None:
    """Requeue the groups of leases."""
    for lease in leases:
        release(lease)


def forward(
    lease: Lease,
    stream: ExperienceStream,
    groups: Mapping[int, list[BufferItem] | None],
    timeout: float | None = None,
) -> None:
    """Move groups of a lease to the next task, exactly once."""
    try:
        lease.forward(stream, groups, timeout=timeout)
    except LeaseLost as error:  # another process generates these groups, and forwards them
        _log.warning("task %r: %s", stream.task, error)
