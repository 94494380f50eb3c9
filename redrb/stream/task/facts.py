"""The facts of a group: the record that a task keeps of each group it stores."""

from __future__ import annotations

from typing import Annotated, Final, Literal, NotRequired, TypeAlias, TypedDict

from msgspec import Meta

from redrb.codec.wire import MAX_BLOB_BYTES, MAX_SAMPLES
from redrb.errors import DecodeError
from redrb.experience import Status
from redrb.stream.task.tags import MOST_BYTES
from redrb.unpacking import unpack_sequence

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
    reads: NotRequired[Count]
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
