"""The facts of a group: the record that a task keeps of each group it stores."""

from __future__ import annotations

from typing import NotRequired, TypedDict

import msgpack

from redrb.experience import Status


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
    """Return the facts that Redis keeps."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(packed)
    facts: Facts
    facts, *current = unpacker
    facts.setdefault("status", Status.COMPLETED.value)
    if current:
        facts["current"] = current[0]
    return facts
