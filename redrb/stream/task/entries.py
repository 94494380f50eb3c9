"""Entries of a task's stream: their ids, and the bytes of the group in each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from redrb.connection.transport import Reply
from redrb.damage import Reading

ID_BASE = "9999999999999-"
"""Prefix of the ids of entries, see `redrb/lua/include/task.lua`."""


def entry_id(seq: int) -> str:
    """Return the id of the entry that holds a group."""
    return f"{ID_BASE}{seq}"


def member_of(seq: int) -> str:
    """Return a group's id as the hashes and sorted sets of a task name it."""
    return f"{seq:016d}"


def texts_of(ids: Sequence[int], most: int) -> Iterator[list[str]]:
    """Yield ids of groups as scripts get them, at most so many at a time."""
    for start in range(0, len(ids), most):
        yield [str(seq) for seq in ids[start : start + most]]


@Reading("an entry of a task's stream")
def parse_entry(entry: Reply) -> tuple[int, bytes | None]:
    """Return the id of a group and its bytes; None where the entry was deleted."""
    raw_id, fields = entry
    seq = int(raw_id.rpartition(b"-")[2])
    if not fields or len(fields) not in (2, 4) or fields[0] != b"g":
        return seq, None
    return seq, fields[1]


@Reading("an entry of a task's stream")
def first_ids(entries: Sequence[Reply]) -> dict[int, int]:
    """Return the first id of those groups that were dead letters and have another id now."""
    return {
        int(raw_id.rpartition(b"-")[2]): int(fields[3])
        for raw_id, fields in entries
        if fields and len(fields) == 4
    }
