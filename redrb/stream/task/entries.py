"""Entries of a task's stream: their ids, the bytes of each group, and its facts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final, Literal, NotRequired, TypeAlias, TypedDict

from msgspec import Meta

from redrb.codec.wire import MAX_BLOB_BYTES, MAX_SAMPLES
from redrb.connection.transport import Reply
from redrb.errors import DecodeError
from redrb.experience import Status
from redrb.stream.task.tags import MOST_BYTES
from redrb.unpacking import SIGNS, Reading, unpack_sequence

MAX_COUNT: Final = 2**52
"""Half of what doubles hold exactly: a resumed task counts on from here."""

Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_COUNT)]

Version: TypeAlias = Annotated[int, Meta(ge=-(2**63) + 1, le=2**63 - 1)]

StatusName: TypeAlias = Annotated[str, Meta(pattern=rf"\A({'|'.join(Status)})\Z")]

Number: TypeAlias = int | float


class SavedFacts(TypedDict):
    """The facts of a group, without the version that was the newest one when it was put."""

    size: Annotated[int, Meta(ge=0, le=MAX_BLOB_BYTES)]
    samples: Annotated[int, Meta(ge=0, le=MAX_SAMPLES)]
    status: StatusName
    score: NotRequired[Number | Literal["-arrival"]]
    priority: NotRequired[Number]
    version: NotRequired[Version]
    newest: NotRequired[Version]
    first: NotRequired[Count]
    tags: NotRequired[dict[str, Number | Annotated[str, Meta(max_length=MOST_BYTES)]]]


class Facts(SavedFacts):
    """The fields that `redrb/lua/include/facts.lua` describes."""

    current: NotRequired[int]


def unpack_facts(packed: bytes) -> Facts:
    """Return the facts that Redis keeps; raises DecodeError if they are damaged."""
    facts: Facts
    facts, *current = unpack_sequence(packed, "record of a group") or [None]
    if not isinstance(facts, dict):
        raise DecodeError(f"the record of a group is not a map: {packed[:40]!r}")
    facts.setdefault("status", Status.COMPLETED.value)
    if current:
        facts["current"] = current[0]
    return facts


ID_BASE = "9999999999999-"
"""Prefix of the ids of entries, see `redrb/lua/include/task.lua`."""


def entry_id(seq: int) -> str:
    """Return the id of the entry that holds a group."""
    return f"{ID_BASE}{seq}"


def member_of(seq: int) -> str:
    """Return a group's id as the hashes and sorted sets of a task name it."""
    return f"{seq:016d}"


def texts_of(ids: Sequence[int | str], most: int) -> Iterator[list[str]]:
    """Yield ids of groups as scripts get them, at most so many at a time."""
    for start in range(0, len(ids), most):
        yield [str(seq) for seq in ids[start : start + most]]


def parse_entries(
    entries: Iterable[Reply],
) -> tuple[list[tuple[int, bytes | None]], dict[int, int]]:
    """Return the id of each group and its bytes; None where the entry was deleted.

    The second result is the first id of those that were dead letters and have another id now.
    """
    found, first_ids = [], {}
    try:
        for raw_id, fields in entries:
            seq = int(raw_id.rpartition(b"-")[2])
            whole = fields and len(fields) in (2, 4) and fields[0] == b"g"
            found.append((seq, fields[1] if whole else None))
            if fields and len(fields) == 4:
                first_ids[seq] = int(fields[3])
    except SIGNS:
        with Reading("an entry of a task's stream"):
            raise
    return found, first_ids


def parse_entry(entry: Reply) -> tuple[int, bytes | None]:
    """Return the id of one group and its bytes, as `parse_entries` does."""
    return parse_entries([entry])[0][0]
