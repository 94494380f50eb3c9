"""Limits of sessions, and the calls of `redrb/lua/session`, which stores their turns.

Every call may be repeated as it is when a connection breaks, and is.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from redrb.lua.calls import Call

MOST_TURNS = 1000
"""Most turns of a session."""

MOST_BYTES = 64 * 2**20
"""Most bytes of the turns of a session: about 14 for a sampled token, 3 for another one."""

MOST_TOKENS = 2**22
"""Most tokens of the samples of a session, which have what their branches share once each."""

GROUP_TOKENS = 2**24
"""Most tokens of the samples of a group, of which each session may have its share: at most 21 bytes
each, so that the group is a value that Redis stores."""

GROUP_EXTRAS = 64 * 2**20
"""Most bytes, as JSON, of the extras of the samples of a group."""


class OpenReply(msgspec.Struct, frozen=True):
    """The reply to the request for a session.

    Attributes:
        outcome: "open"; "unadmitted": it is the first one of a group, which needs a right; "gone":
            the task was deleted, or created anew.
        keeps_right: Whether the group keeps the right that was given.
        is_new: Whether this request has begun it, not an equal one.
        version: Weight version that the task knows; None: none.
    """

    outcome: Literal["open", "unadmitted", "gone"]
    keeps_right: bool = False
    is_new: bool = False
    version: int | None = None


class OpenSession(Call[OpenReply], frozen=True, kw_only=True):
    """Begin a session as the next part of the group that its prompt fills, or of a new group.

    If the session is there already, it is found.

    Attributes:
        session: Name of the session in Redis.
        head: What it stores: fields "id", "prompt", "size", "least" and "bury" of `Session`,
            "opener", which names the request, and "place", which names the prompt and the options
            of its groups.
        group: Key of a group in parts, if one begins.
        tags: Of such a group, as JSON.
        series, right: A right of admission for it; "": none.
        ttl_ms: Time to live of the session and its group without a further call.
        incarnation: Of the task, as this process knows it.
    """

    script: ClassVar = "session/open"
    session: str
    head: dict[str, Any]
    group: str
    tags: str
    ttl_ms: int
    incarnation: str = ""
    series: str = ""
    right: str = ""


class UseReply(msgspec.Struct, frozen=True):
    """The reply to the use of a session.

    Attributes:
        short: Whether it was the last open session of a group that lacks others, which were
            dropped.
    """

    outcome: Literal["used", "unknown"]
    short: bool = False


class UseSession(Call[UseReply], frozen=True):
    """Let a session live on, before it is read in the same round trip.

    Attributes:
        ends: Whether it gets no further turns from now on, if it has any.
    """

    script: ClassVar = "session/use"
    session: str
    ttl_ms: int
    ends: bool


class AppendTurn(
    Call[Literal["stored", "known", "over", "full", "edited", "unknown"]], frozen=True
):
    """Store a turn, which goes beside the call; "known": the reply has the one that was first.

    Attributes:
        request: Digest of the request that the turn answers.
        parent: Of the turn.
        tokens: Of the turn itself.
        most_samples, most_tokens: Bounds of the samples, which have what their branches share once
            each.
        may_branch: Whether it may begin one more sample than the first; else it is "edited".
    """

    script: ClassVar = "session/append"
    session: str
    request: str
    ttl_ms: int
    parent: int
    tokens: int
    most_turns: int
    most_bytes: int
    most_samples: int
    most_tokens: int
    may_branch: bool


class DropSession(Call[Literal["dropped"]], frozen=True):
    """Delete a session that is not over; its group's right returns if that has no other session.

    Attributes:
        unless_shared: It stays if an equal request has found it, too.
    """

    script: ClassVar = "session/drop"
    session: str
    unless_shared: bool = False
