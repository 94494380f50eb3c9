"""Turns of sessions at a gateway, for tests: each sampled token is another one."""

from __future__ import annotations

import itertools
from typing import Any

from redrb.gateway.session import Session, Turn
from redrb.train.engines import Generation

_numbers = itertools.count(1)


def turn(parent: int = -1, tokens: int = 2, *, given: int = 1, **changes: Any) -> Turn:
    """Return a turn with new tokens; its log-probs are numbers that float32 holds."""
    numbers = list(itertools.islice(_numbers, given + tokens))
    sampled = Generation(
        numbers[given:], [-each / 4 for each in numbers[given:]], [7] * tokens, "stop"
    )
    fields: dict[str, Any] = {
        "parent": parent,
        "request": b"request %d" % numbers[0],
        "after": b"after %d" % numbers[0],
        "given": numbers[:given],
        "sampled": sampled,
        "reply": b'{"content": "\xc3\xa4"}',
    }
    return Turn(**{**fields, **changes})


def session_of(*turns: Turn, **changes: Any) -> Session:
    """Return a session that has these turns."""
    fields: dict[str, Any] = {"id": "s1", "index": 0, "size": 1, "prompt": "p", "tags": "{}"}
    return Session(turns=list(turns), **{**fields, **changes})
