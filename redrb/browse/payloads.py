"""`payloads_of`: reads the bytes of groups, a few at a time, none that is too large."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from redrb.browse.choice import Limits
from redrb.browse.entries import Entry
from redrb.browse.walk import Walk
from redrb.connection.transport import Pipeline
from redrb.stream.task.entries import entry_id, parse_entry
from redrb.stream.task.store import TaskStore

_REQUEST_GROUPS: Final = 32
_REQUEST_BYTES: Final = 8 << 20
"""Groups, and their bytes, that one request reads; a single group may be larger."""


def payloads_of(
    walk: Walk, entries: Iterable[Entry], limits: Limits
) -> Iterator[tuple[Entry, bytes | None, str]]:
    """Yield groups with their bytes, or None and why they were not read, "" if they are gone."""
    batch: list[Entry] = []
    nbytes = 0
    for entry in entries:
        if batch and (len(batch) >= _REQUEST_GROUPS or nbytes + entry.size > _REQUEST_BYTES):
            yield from _read(walk, batch, limits)
            batch, nbytes = [], 0
        batch.append(entry)
        nbytes += entry.size
    if batch:
        yield from _read(walk, batch, limits)


def _read(
    walk: Walk, batch: Sequence[Entry], limits: Limits
) -> Iterator[tuple[Entry, bytes | None, str]]:
    small = [entry for entry in batch if entry.facts and entry.size <= limits.group_bytes]
    found = {
        place: _blobs(
            walk.stores[place],
            [entry.seq for entry in small if entry.place == place],
            walk.incarnations[place],
        )
        for place in {entry.place for entry in small}
    }
    for entry in batch:
        too_large = entry.size > limits.group_bytes
        why = f"it has {entry.size:,} bytes and was not read" if too_large else ""
        yield entry, found.get(entry.place, {}).get(entry.seq), why


def _blobs(store: TaskStore, seqs: Sequence[int], incarnation: str) -> dict[int, bytes]:
    """Return the bytes of groups by id; none if the task was created anew meanwhile."""
    if not seqs:
        return {}
    pipeline = Pipeline()
    for seq in seqs:
        pipeline.add("XRANGE", store.keys.stream, entry_id(seq), entry_id(seq))
    pipeline.add("HGET", store.keys.task, "incarnation")
    *replies, now = store.exchange(pipeline)
    if (now or b"").decode(errors="replace") != incarnation:
        return {}
    entries = [parse_entry(reply[0]) for reply in replies if reply]
    return {seq: blob for seq, blob in entries if blob is not None}
