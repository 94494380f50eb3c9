"""The facts of a group: the record that a task keeps of each group it stores."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from redrb.errors import DecodeError
from redrb.experience import Status
from redrb.unpacking import unpack_sequence


class Facts(TypedDict):
    """The fields that `redrb/lua/include/facts.lua` describes."""

    size: int
    samples: int
    status: str
    score: NotRequired[float | str]
    priority: NotRequired[float]
    version: NotRequired[int]
    newest: NotRequired[int]
    reads: NotRequired[int]
    tags: NotRequired[dict[str, float | str]]
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
