"""Turns of sessions at a gateway, for tests: each sampled token is another one."""

from __future__ import annotations

import itertools
import json
from typing import Any

from redrb.gateway.session import Session, Turn
from redrb.train.engines import Generation

_numbers = itertools.count(1)


def reply_of(content: str, **changes: Any) -> dict[str, Any]:
    """Return a stored reply, as `ChatServer.reply` returns it."""
    message = {"role": "assistant", "content": content}
    found = {"id": "r", "created": 1, "message": message, "finish": "stop", "stop": None}
    return {**found, "usage": [1, 2], **changes}


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
        "reply": json.dumps(reply_of("\u00e4"), ensure_ascii=False).encode(),
    }
    return Turn(**{**fields, **changes})


def session_of(*turns: Turn, **changes: Any) -> Session:
    """Return a session that has these turns."""
    fields: dict[str, Any] = {"id": "s1", "index": 0, "size": 1, "prompt": "p", "tags": "{}"}
    return Session(turns=list(turns), **{**fields, **changes})
