"""The facts of a group: the record that an indexed task keeps of each group it stores."""

from __future__ import annotations

from typing import NotRequired, TypedDict

import msgpack


class Facts(TypedDict):
    """The fields that `redrb/lua/include/facts.lua` describes."""

    size: int
    samples: int
    status: str
    score: float | str
    priority: NotRequired[float]
    version: NotRequired[int]
    newest: NotRequired[int]
    reads: NotRequired[int]
    tags: NotRequired[dict[str, float | str]]
    current: NotRequired[int]


def unpack_facts(packed: bytes) -> Facts:
    """Return the facts that a script has packed."""
    facts: Facts = msgpack.unpackb(packed)
    return facts
