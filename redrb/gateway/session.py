"""`Session`: the turns that an agent has sampled, as Redis holds them, and the samples of these."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from redrb.errors import RecordError
from redrb.experience import BufferItem
from redrb.train.engines.completions import Generation
from redrb.train.engines.trajectory import Trajectory
from redrb.unpacking import Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of an agent, and what was sampled for it.

    Attributes:
        parent: Index of the turn that it goes on from; -1: it begins anew.
        request: Digest of the whole request.
        before: Digest of the history that was asked.
        after: Digest of that history with the reply.
        given: Tokens between the last token of the parent and the first that was sampled; where it
            begins anew, the whole prompt.
        sampled: The completion; routed experts are not stored.
        reply: The reply to the agent, as JSON.
    """

    parent: int
    request: bytes
    before: bytes
    after: bytes
    given: list[int]
    sampled: Generation
    reply: bytes


class Session(msgspec.Struct, kw_only=True):
    """A session as it was read: its place in a group, and its turns so far.

    Attributes:
        id: Its public name.
        index: Its place in the group.
        size: Sessions of a group.
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
    size: int
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
    right: str = ""

    def path(self, turn: int) -> list[int]:
        """Return the indices of the turns from a beginning to this one; none for -1."""
        found = []
        while turn >= 0:
            found.append(turn)
            turn = self.turns[turn].parent
        return found[::-1]

    def tokens(self, turn: int) -> list[int]:
        """Return all tokens up to the end of a turn, as the engine had them; none for -1."""
        turns = [self.turns[each] for each in self.path(turn)]
        return [token for each in turns for token in (*each.given, *each.sampled.tokens)]

    def sample_tokens(self, *more: Turn) -> int:
        """Return the tokens of all samples, as if the session had further turns, too.

        Branches share tokens, and each sample has them all.
        """
        lengths: list[int] = []
        turns = (*self.turns, *more)
        for turn in turns:
            before = lengths[turn.parent] if 0 <= turn.parent < len(lengths) else 0
            lengths.append(before + len(turn.given) + len(turn.sampled.tokens))
        parents = {turn.parent for turn in turns}
        return sum(length for index, length in enumerate(lengths) if index not in parents)

    def items(self, reward: float, extras: Mapping[str, Any] | None = None) -> list[BufferItem]:
        """Return a sample for each turn that none goes on from, in the order of these turns.

        A sample has all tokens from the beginning on. Given tokens behind the prompt are masked, as
        are turns that an earlier sample has: each sampled token counts once.

        Args:
            reward: Of each sample.
            extras: Of each sample, beside "prompt" and "session", the ids.

        Raises:
            RecordError: The session has no turn.
        """
        if not self.turns:
            raise RecordError(f"session {self.id} has no turn: drop it, or send a request first.")
        parents, counted = {turn.parent for turn in self.turns}, set[int]()
        with Reading("the tags of a session"):
            tags = dict(json.loads(self.tags))
        found = []
        for leaf in sorted(set(range(len(self.turns))) - parents):
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
            known = {"prompt": self.prompt, "session": self.id}
            found.append(trajectory.item(reward, tags=tags, extras=known | dict(extras or {})))
        return found


class StoredTurn(msgspec.Struct, frozen=True):
    """A turn as Redis holds it: docs/reference/wire-format.md.

    Attributes:
        given, tokens, versions: int32, little-endian.
        log_probs: float32, little-endian.
    """

    parent: int
    request: bytes
    before: bytes
    after: bytes
    given: bytes
    tokens: bytes
    log_probs: bytes
    versions: bytes
    finish: Literal["stop", "length"]
    reply: bytes


_INTEGERS, _FLOATS = np.dtype("<i4"), np.dtype("<f4")
_read = msgspec.msgpack.Decoder(StoredTurn).decode


def encode_turn(turn: Turn) -> bytes:
    """Return a turn as Redis holds it.

    Raises:
        RecordError: It has no sampled token, was aborted, or has numbers that none of these is.
    """
    done = turn.sampled
    if done.finish == "abort" or not done.tokens:
        raise RecordError("a turn was aborted, or has no token: it is not stored; sample it again.")
    if not len(done.tokens) == len(done.log_probs) == len(done.versions):
        raise RecordError("a turn has not one log-probability and one version for each token.")
    try:
        given, tokens, versions = (
            np.array(each, _INTEGERS).tobytes() for each in (turn.given, done.tokens, done.versions)
        )
        log_probs = np.array(done.log_probs, _FLOATS).tobytes()
    except (OverflowError, ValueError, TypeError) as error:
        raise RecordError(f"a turn has tokens or versions that are no int32: {error}") from error
    return msgspec.msgpack.encode(
        StoredTurn(
            turn.parent,
            turn.request,
            turn.before,
            turn.after,
            given,
            tokens,
            log_probs,
            versions,
            done.finish,
            turn.reply,
        )
    )


def decode_turn(stored: bytes, index: int) -> Turn:
    """Return the turn of a session with this index; raises StoreError if it is damaged."""
    with Reading("a turn of a session"):
        found = _read(stored)
        given, tokens, versions = (
            np.frombuffer(each, _INTEGERS).tolist()
            for each in (found.given, found.tokens, found.versions)
        )
        log_probs = np.frombuffer(found.log_probs, _FLOATS).tolist()
        if not -1 <= found.parent < index:
            raise ValueError(f"turn {index} goes on from {found.parent}")
        if not 0 < len(tokens) == len(log_probs) == len(versions):
            raise ValueError(f"turn {index} has lists of different lengths")
        sampled = Generation(tokens, log_probs, versions, found.finish)
    return Turn(
        parent=found.parent,
        request=found.request,
        before=found.before,
        after=found.after,
        given=given,
        sampled=sampled,
        reply=found.reply,
    )
