"""`Session`: the turns that an agent has sampled, as Redis holds them, and the samples of these."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from redrb.errors import RecordError
from redrb.experience import BufferItem
from redrb.experience.fields import SESSION, Scalar
from redrb.train.engines.completions import Generation
from redrb.train.engines.trajectory import Trajectory
from redrb.unpacking import Reading

MOST_NUMBER = 2**31 - 1
"""Largest token id and version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of an agent, and what was sampled for it.

    Attributes:
        parent: Index of the turn that it goes on from; -1: it begins anew.
        request: Digest of the whole request.
        after: Digest of its history with the reply.
        given: Tokens between the last token of the parent and the first that was sampled; where it
            begins anew, the whole prompt.
        sampled: The completion; routed experts are not stored.
        reply: The reply to the agent, as JSON.
    """

    parent: int
    request: bytes
    after: bytes
    given: list[int]
    sampled: Generation
    reply: bytes


class Session(msgspec.Struct, kw_only=True):
    """A session as it was read: its place in a group, and its turns so far.

    Attributes:
        id: Its public name.
        index: Its place in the group.
        size: Sessions of a group, >= 1.
        turns: In the order in which they were stored.
        over: Whether it has its reward, and takes no further turns.
        short: Whether it is the last one of a group of which others were dropped.
        name: Its name in Redis.
        group: Key of the group in parts.
        prompt: Id of the prompt.
        least: Fewest sessions with which the group is put.
        bury: Whether a group with fewer becomes a dead letter; else it is dropped.
        tags: Of the group, as JSON.
        series, right: The right of the group; "": none.
    """

    id: str
    index: int
    size: Annotated[int, msgspec.Meta(ge=1)]
    turns: list[Turn] = msgspec.field(default_factory=list)
    over: bool = False
    short: bool = False
    name: str = ""
    group: str = ""
    prompt: str = ""
    least: int = 1
    bury: bool = False
    tags: str = "{}"
    series: str = ""
    right: Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{0,18}\Z")] = ""

    @property
    def parents(self) -> set[int]:
        """Turns that others go on from; -1 if there is any turn."""
        return {turn.parent for turn in self.turns}

    def path(self, turn: int) -> list[int]:
        """Return the indices of the turns from a beginning to this one; none for -1."""
        found = []
        while turn >= 0:
            found.append(turn)
            turn = self.turns[turn].parent
        return found[::-1]

    def tokens(self, turn: int) -> list[int]:
        """Return all tokens up to the end of a turn, as the engine had them; none for -1."""
        found: list[int] = []
        for each in self.path(turn):
            found += self.turns[each].given
            found += self.turns[each].sampled.tokens
        return found

    def items(self, reward: float, extras: Mapping[str, Any] | None = None) -> list[BufferItem]:
        """Return a sample for each turn that none goes on from, in the order of these turns.

        A sample has all tokens from the beginning on. Given tokens behind the prompt are masked, as
        are turns that an earlier sample has: each sampled token counts once.

        Args:
            reward: Of each sample.
            extras: Of each sample, beside "prompt", the id. "redrb_session" stays the session's id,
                by which the trainer knows its samples.

        Raises:
            RecordError: The session has no turn.
        """
        if not self.turns:
            raise RecordError(f"session {self.id} has no turn: drop it, or send a request first.")
        counted = set[int]()
        with Reading("the tags of a session"):
            tags = msgspec.convert(json.loads(self.tags), dict[str, Scalar])
        found = []
        for leaf in sorted(set(range(len(self.turns))) - self.parents):
            first, *others = self.path(leaf)
            trajectory = Trajectory(self.turns[first].given)
            for index in (first, *others):
                turn = self.turns[index]
                trajectory.given(turn.given if index != first else ())
                if index in counted:
                    trajectory.given(turn.sampled.tokens)
                else:
                    trajectory.sampled(turn.sampled)
            counted.update((first, *others))
            known = {"prompt": self.prompt, **(extras or {}), SESSION: self.id}
            found.append(trajectory.item(reward, tags=tags, extras=known))
        return found


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    id: str
    function: _Function


class _Message(msgspec.Struct):
    content: str
    reasoning: str = ""
    tool_calls: list[_Call] = []


class _Reply(msgspec.Struct):
    """The reply of a turn, as `ChatServer.reply` returns it, without `whole`."""

    id: str
    created: int
    message: _Message
    finish: Literal["stop", "length", "tool_calls"]
    stop: str | None
    usage: tuple[int, int]


_reply = msgspec.json.Decoder(_Reply).decode
_encode = msgspec.msgpack.Encoder(enc_hook=lambda _: None).encode  # without routed experts
_decode = msgspec.msgpack.Decoder(Turn).decode


def encode_turn(turn: Turn) -> bytes:
    """Return a turn as Redis holds it: docs/reference/keys.md.

    Raises:
        RecordError: It was aborted, has no sampled token, or something else than numbers.
    """
    try:
        stored = _encode(turn)
        _checked(stored, turn.parent + 1)
    except (ValueError, OverflowError, TypeError) as error:
        raise RecordError(f"a turn cannot be stored, sample it again: {error}") from error
    return stored


def decode_turn(stored: bytes, index: int) -> Turn:
    """Return the turn of a session with this index; raises StoreError if it is damaged."""
    with Reading("a turn of a session"):
        return _checked(stored, index)


def _checked(stored: bytes, index: int) -> Turn:
    turn = _decode(stored)
    _reply(turn.reply)
    done, count = turn.sampled, len(turn.sampled.tokens)
    if not 0 < count == len(done.log_probs) == len(done.versions) or done.finish == "abort":
        raise ValueError("it was aborted, or has not as many log-probs and versions as tokens")
    tokens = (*done.tokens, *turn.given)
    if not -1 <= turn.parent < index or min(tokens) < 0:
        raise ValueError("it goes on from no earlier turn, or has a token below 0")
    if max(*tokens, *done.versions) > MOST_NUMBER:
        raise ValueError("it has a token or version that is no int32")
    return turn
