"""`SessionStore`: sessions of agents in Redis, with which any gateway of their task goes on."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from redrb.checks import checked_number
from redrb.codec import encode_groups
from redrb.codec.wire import MAX_SAMPLES
from redrb.connection.client import Request
from redrb.connection.deadline import Deadline
from redrb.connection.stop import Stop
from redrb.connection.transport import Pipeline, Replication, Reply, without_errors
from redrb.errors import (
    AdmissionTimeout,
    ConfigError,
    RecordError,
    SessionOver,
    UnknownSession,
)
from redrb.experience.fields import Scalar
from redrb.gateway.calls import (
    GROUP_EXTRAS,
    GROUP_TOKENS,
    MOST_BYTES,
    MOST_TOKENS,
    MOST_TURNS,
    AppendTurn,
    DropSession,
    OpenReply,
    OpenSession,
    UseSession,
)
from redrb.gateway.messages import Edited
from redrb.gateway.session import Session, Turn, decode_turn, encode_turn
from redrb.scopes import Closing
from redrb.stream import ExperienceStream
from redrb.stream.assembly.calls import MOST_PARTS, PART_AGE, GroupPart, OnIncomplete
from redrb.stream.put.rights import Rights
from redrb.stream.task.tags import tag_values
from redrb.train.engines.trajectory import Trajectory
from redrb.unpacking import Reading, whole

MOST_PROMPT_BYTES = 200
"""Most bytes of the id of a prompt."""

SHORT_AGE = "30s"
"""Age limit of a group whose last open session is over, while others of it were dropped."""

ROOM_S = 30.0
"""Seconds for which a reward waits for room for its group; without room its parts are stored."""

_head = msgspec.msgpack.Decoder(Session).decode


@dataclass(frozen=True, slots=True)
class Opened:
    """A session that has begun.

    Attributes:
        id: Its public name.
        secret: With the id, it opens the session; nothing else has it.
        name: Its name in Redis, under which `SessionStore` uses it.
        version: Weight version that the task knows; None: none.
        is_new: Whether this request has begun it, not an equal one.
    """

    id: str
    secret: str
    name: str
    version: int | None
    is_new: bool


class SessionStore(Closing):
    """Opens sessions of a task, goes on with them and ends them; safe among threads.

    A session and the right of its group are in Redis alone: they outlive any gateway. They expire
    when no call has used the session for `timeout_s`; the group then follows the rule of
    `ExperienceStream.put_part`.

    Attributes:
        timeout_s: Seconds after which a session that no call uses is gone.
    """

    def __init__(self, stream: ExperienceStream, *, timeout_s: float) -> None:
        """Use a task.

        Args:
            stream: Of the task; it is closed with the store.
            timeout_s: See above.

        Raises:
            ConfigError: The time is not > 0.
        """
        self.timeout_s = checked_number("timeout_s", timeout_s)
        self._ttl_ms = round(timeout_s * 1000)
        if self._ttl_ms <= 0:
            raise ConfigError(f"timeout_s={timeout_s!r}: give seconds > 0.")
        self._part_age = f"{math.ceil(timeout_s)}s"
        self._stream = stream
        self._task = stream._task  # noqa: SLF001 (a session is stored with its task)
        self._replication = Replication(self._task.store.client.min_replicas)
        self._admitting = threading.Lock()

    def open(
        self,
        prompt: str,
        *,
        size: int,
        tags: Mapping[str, Scalar] | None = None,
        least: int | None = None,
        on_incomplete: OnIncomplete = "drop",
        wait_s: float,
        once: str = "",
        stop: Stop | None = None,
    ) -> Opened:
        """Begin a session: the next of the group that sessions of this prompt are filling.

        The first session of a group takes one right of admission, if the task gives rights; it is
        held by the group, not by this process.

        Args:
            prompt: Id of the prompt, a text of 1 to 200 bytes.
            size: Sessions of a group. Sessions with another size or rule fill another group.
            tags: Of the samples of the group; those of its first session hold.
            least: Fewest sessions with which the group is put; default: all.
            on_incomplete: What becomes of a group with fewer: "drop", or "dead", a dead letter.
            wait_s: Seconds to wait for a right; 0 looks once.
            once: A secret of the caller: the same call with it finds the session that it has begun,
                at any gateway, until that is dropped or expires. "": each call begins one.
            stop: Ends the wait when it is asked.

        Raises:
            ConfigError: An argument is not usable, or the task never gives a right.
            EncodeError, RecordError: A tag cannot be stored.
            AdmissionTimeout: There was no right in time.
            StoreUnavailable: Redis stayed away.
        """
        usable = isinstance(prompt, str) and prompt.isprintable()
        if not usable or not 0 < len(prompt.encode(errors="ignore")) <= MOST_PROMPT_BYTES:
            raise ConfigError(
                f"prompt={prompt!r:.80}: give a text of 1 to {MOST_PROMPT_BYTES} bytes."
            )
        opener = secrets.token_hex(8)
        group = f"{prompt}:{opener}"
        part = GroupPart.checked(group, 0, size, least, PART_AGE, on_incomplete, MOST_PARTS)
        rule = {"prompt": prompt, "size": part.of, "least": part.least, "bury": part.bury}
        named = json.dumps(self._checked_tags(tags))
        asked = json.dumps([once or secrets.token_hex(), self._task.store.keys.prefix, rule, named])
        drawn = hashlib.blake2b(asked.encode(), digest_size=32).hexdigest()
        id_, secret = drawn[:16], drawn[16:]
        head = {"id": id_, "opener": opener, "place": _digest(json.dumps(rule)), **rule}
        name, ttl_ms = session_name(id_, secret), self._ttl_ms
        call = OpenSession(session=name, head=head, group=group, tags=named, ttl_ms=ttl_ms)
        wait_s = checked_number("wait_s", wait_s)
        with Deadline(wait_s, stop=stop):
            reply = self._opened(call)
            if reply.outcome == "unadmitted":
                reply = self._admitted(call, min(wait_s, threading.TIMEOUT_MAX))
        return Opened(id_, secret, name, reply.version, reply.is_new)

    def use(self, name: str) -> None:
        """Set a session's time to live anew; errors are those of `read`, which costs more."""
        with Deadline():
            call = UseSession(name, self._ttl_ms, ends=False)
            if self._task.store.call(call).outcome == "unknown":
                raise UnknownSession

    def append(self, session: Session, turn: Turn, *, may_branch: bool = True) -> Turn:
        """Store a turn, exactly once for each request.

        A session may have its share of what the samples of a group may have together.

        Args:
            session: As it was read.
            turn: The turn.
            may_branch: Whether it may begin one more sample of a session that has one.

        Returns:
            The stored turn: this one, or the one that answered the same request before.

        Raises:
            RecordError: The turn is aborted or malformed; nothing was stored.
            Edited: It would branch, and may not; nothing was stored.
            SessionOver: The session has its reward, or is full; nothing was stored.
            UnknownSession: It is gone.
            StoreUnavailable: Redis stayed away; append it again.
        """
        call = AppendTurn(
            session.name,
            turn.request.hex(),
            self._ttl_ms,
            turn.parent,
            len(turn.given) + len(turn.sampled.tokens),
            MOST_TURNS,
            MOST_BYTES,
            MAX_SAMPLES // session.size,
            min(MOST_TOKENS, GROUP_TOKENS // session.size),
            may_branch,
        )
        store, made = self._task.store, Pipeline()
        call.add_to(made, store.script_keys, encode_turn(turn))
        self._replication.add_to(made)

        def read(replies: list[Reply]) -> Turn:
            done, confirmed = self._replication.divide(replies)
            [(packed, *first)] = without_errors(done)
            outcome = call.read(packed)
            if outcome == "unknown":
                raise UnknownSession
            if outcome == "edited":
                raise Edited
            if outcome in ("over", "full"):
                raise SessionOver(session.id, outcome)
            self._replication.check(confirmed)
            return decode_turn(first[0], MOST_TURNS) if outcome == "known" else turn

        with Deadline(), Reading("the reply to a turn"):
            return Request(store.client, made, read).result()

    def reward(
        self, name: str, reward: float, *, extras: Mapping[str, Any] | None = None
    ) -> int | None:
        """Put a session as its part of the group; it takes no turns from then on.

        It may be repeated: the part counts once, with the reward that was stored first.

        Returns:
            Id of the group; None while sessions of it are missing, or if it was dropped.

        Raises:
            ConfigError: The reward is no finite number.
            RecordError, EncodeError: The session has no turn, or the extras cannot be stored; give
                others.
            UnknownSession: It is gone.
            StoreFull: There is no room for the group; if its parts are stored, it is put later.
            StoreUnavailable: Redis stayed away; send it again.
        """
        reward = checked_number("reward", reward)
        found = self.read(name, ends=True)
        items = found.items(reward, extras)
        nbytes = len(msgspec.json.encode(extras or {}, enc_hook=str))
        if nbytes * len(items) * found.size > GROUP_EXTRAS:
            raise RecordError(
                f"extras of {nbytes} bytes cannot go with {len(items)} samples of one of "
                f"{found.size} sessions: give smaller ones."
            )
        prefix, numbers = self._task.store.keys.prefix, (int(found.right or 0),)
        rights = Rights(self._task.name, prefix, found.series, numbers) if found.right else None
        return self._stream.put_part(
            found.group,
            items,
            index=found.index,
            of=found.size,
            least=found.least,
            part_age=SHORT_AGE if found.short else self._part_age,
            on_incomplete="dead" if found.bury else "drop",
            admission=rights,
            timeout=ROOM_S,
        )

    def drop(self, name: str, *, unless_shared: bool = False) -> None:
        """Delete a session, which becomes no part of its group; repeated, it changes nothing.

        If the group has no other session, its right returns. A session that is over stays as it is
        until it expires: its reward may have to be repeated.

        Args:
            name: Of the session.
            unless_shared: It stays if an equal request has found it, too.

        Raises:
            StoreUnavailable: Redis stayed away.
        """
        with Deadline():
            self._task.store.call(DropSession(name, unless_shared))

    def close(self) -> None:
        """Close the stream; sessions stay, and other gateways go on with them."""
        self._stream.close()

    def _checked_tags(self, tags: Mapping[str, Scalar] | None) -> dict[str, Scalar]:
        """Return tags that can be put later, or raise the error of such a put."""
        if not (tags is None or isinstance(tags, Mapping)):
            raise ConfigError(f"tags={tags!r:.80}: give a dict, a value for each tag.")
        item = Trajectory((0,)).item(tags=tags)
        encode_groups([[item]])
        tag_values(self._task.description.tags, [item], None)
        return item.tags

    def _opened(self, call: OpenSession) -> OpenReply:
        while True:
            incarnation = self._task.description.incarnation
            reply = self._task.store.call(replace(call, incarnation=incarnation))
            if reply.outcome != "gone":
                return reply
            self._task.reopen(refused_here=True)

    def _admitted(self, call: OpenSession, wait_s: float) -> OpenReply:
        """Open a session with a right, unless another session begins the group meanwhile.

        One thread asks for a right at a time: the sessions of a prompt, which begin together, would
        else wait for as many rights as they are, and their group needs one.
        """
        mine = self._admitting.acquire(timeout=wait_s)
        try:
            reply = self._opened(call)
            while reply.outcome == "unadmitted":
                try:
                    with self._stream.admit() as right:
                        rights, kept = right.hand_over(1), False
                        series, number = rights.series, str(rights.numbers[0])
                        try:
                            reply = self._opened(replace(call, series=series, right=number))
                            kept = reply.keeps_right
                        finally:
                            (rights.note_ended if kept else rights.hand_back)(rights.numbers)
                except AdmissionTimeout:
                    reply = self._opened(call)  # another gateway may have begun the group
                    if reply.outcome == "unadmitted":
                        raise
            return reply
        finally:
            if mine:
                self._admitting.release()

    def read(self, name: str, *, ends: bool = False) -> Session:
        """Return a session with its turns so far, and set its time to live anew.

        Args:
            name: Of the session.
            ends: It takes no turns from now on, if it has any.

        Raises:
            UnknownSession: There is none.
            StoreUnavailable: Redis stayed away.
        """
        store = self._task.store
        use, look = UseSession(name, self._ttl_ms, ends), Pipeline()
        use.add_to(look, store.script_keys)
        look.add("HGETALL", f"{store.keys.prefix}session:{name}")

        def read(replies: list[Reply]) -> Session | None:
            used, stored = without_errors(replies)
            fields = dict(zip(*[iter(stored)] * 2, strict=True))
            reply = use.read(used)
            if reply.outcome == "unknown" or not fields:
                return None
            session = _head(fields[b"head"])
            try:
                place = session.group, session.index, session.size, session.least
                GroupPart.checked(*place, PART_AGE, "drop", MOST_PARTS)
            except ConfigError as error:
                raise ValueError(str(error)) from error
            turns = range(whole(fields[b"turns"]))
            session.turns = [decode_turn(fields[b"%d" % index], index) for index in turns]
            session.name, session.over, session.short = name, b"over" in fields, reply.short
            return session

        with Deadline(), Reading("a session"):
            found = Request(store.client, look, read).result()
        if found is None:
            raise UnknownSession
        return found


def session_name(id_: str, secret: str) -> str:
    """Return the name of a session in Redis.

    It is found by this digest, so no secret is compared, and none stands in Redis.
    """
    return _digest(f"{id_}.{secret}")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
