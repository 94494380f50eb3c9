"""What Redis does for one task: a typed function for each script and transaction.

Every function may be repeated with the same arguments when a connection breaks, and is: see the
headers of the scripts in `redrb/lua`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from redis.exceptions import RedisError, ResponseError

from redrb.connection import Client
from redrb.connection.failures import is_missing_script, is_transient
from redrb.connection.request import Request
from redrb.connection.transport import Argument, Pipeline, Reply, first_error, packed
from redrb.errors import ConfigError, StoreError, TaskMismatch
from redrb.experience import Status
from redrb.keys import TaskKeys
from redrb.lua.scripts import add_to, load, run
from redrb.orders import Fifo, Score
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.indexing import Indexer

WIRE_FORMAT = 1

MOVE_GROUPS = 1000
"""Most groups that one script call moves."""

TRIM_GROUPS = 1000
"""As many groups of history `redrb/lua/task/trim.lua` deletes at least, where there are so many."""

_JOIN_MORE, _JOIN_PLAIN = 2, 3
_MOVE_JOINS, _MOVE_PLAIN = -1, -2

_SHORTEST_BLOCK_S = 0.002
"""Redis 6.2 takes a timeout of 0.001 s for 0, which is for ever."""

ID_BASE = "9999999999999-"
"""What ids of entries begin with, see `redrb/lua/include/task.lua`."""


@dataclass(frozen=True, slots=True)
class PutReply:
    """What became of a put.

    Attributes:
        outcome: "ok", "again" (an earlier attempt landed), "full", "never", "gone", "indexed" (it
            was made for other settings than the task's) or "plain" (convert the task first).
        last: Id of the last group stored.
        stored: Groups stored; by an earlier attempt it may be another number.
        room: Groups that may still be put; -1 without a limit.
        setting: What leaves no room when it is full: "limit", "rate" or "max_bytes".
        expired: Groups that were too stale on arrival.
    """

    outcome: str
    last: int = 0
    stored: int = 0
    room: int = -1
    setting: str = ""
    expired: int = 0


@dataclass(frozen=True, slots=True)
class TakeReply:
    """What became of a take.

    Attributes:
        outcome: "taken", "short", "never", "gone", "more" (there is more to do before: ask
            again) or "late" (a later take of the slot came first).
        amount: Groups leased, groups waiting, or the limit, as `outcome` says.
        blocked: Producers that wait for room, where too few groups are waiting.
        expired: Groups that turned out to be too stale, where too few are waiting.
        others: Groups that wait with another status, where too few are waiting.
        entries: Id and payload of each group, in the task's order; None where it is gone.
        weights: Weight of each, in an order that draws; else empty.
        total_weight: Sum of the weights of all that waited.
        held: False when the lease to be ended first is another consumer's by now.
    """

    outcome: str
    amount: int = 0
    blocked: int = 0
    entries: tuple[tuple[int, bytes | None], ...] = ()
    held: bool = True
    weights: tuple[float, ...] = ()
    total_weight: float = 0.0
    expired: int = 0
    others: int = 0


@dataclass(frozen=True, slots=True)
class Ending:
    """How groups of a lease end.

    Attributes:
        slot: The lease's slot.
        token: The lease's token.
        outcome: "ack", "expire", "release", "fail" or "reject".
        ids: Which groups.
        reason: Why, for the dead-letter stream.
        samples: Samples in them.
        ends: Whether nothing of the lease is left then.
    """

    slot: str
    token: str
    outcome: str
    ids: tuple[int, ...]
    reason: str = ""
    samples: int = 0
    ends: bool = True

    def arguments(self, group: str, consumer: str) -> list[Argument]:
        """Return the ARGV of the script `finish`."""
        who = [group, consumer, self.slot, self.token, self.outcome, self.reason]
        return [*who, self.samples, int(self.ends), *self.ids]


class TaskStore:
    """One task's keys on one client.

    Attributes:
        indexer: How the groups of an indexed task are described; None: the task is plain.
        names: Tags that the task declares.
        by_token: Whether it has a rule for the newest token.
    """

    def __init__(self, client: Client, task: str, keys: TaskKeys) -> None:
        self.client = client.at(keys.stream)
        self.task = task
        self.keys = keys
        self._stream = [keys.stream]
        self._xadd = packed("XADD", keys.stream, "NOMKSTREAM", "*", "g")
        self.indexer: Indexer | None = None
        self.names: tuple[str, ...] = ()
        self.by_token = False

    def open(self, settings: Mapping[str, str]) -> dict[str, str]:
        """Create the task or check its settings; returns all of them.

        Raises:
            TaskMismatch: It exists with others.
            ConfigError: It is to evict the stalest, and indexes no versions.
        """
        flat = [word for item in settings.items() for word in item]
        head, *reply = self._run("task/open", flat)
        if head == b"plain":
            self.convert()
            return self.open(settings)
        if head == b"unversioned":
            raise ConfigError(
                f'task {self.task!r} indexes no versions, so eviction="stalest" has nothing to go '
                'by: give order="stalest" or max_staleness too.'
            )
        told = {
            name.decode(): value.decode() if value is not None else ""
            for name, value in zip(reply[::2], reply[1::2], strict=True)
        }
        if head == b"differs":
            raise TaskMismatch(self.task, {name: (told[name], settings.get(name)) for name in told})
        if told.pop("filling"):  # a rule of staleness is new: what waits is indexed, page by page
            while self._run("task/fill", []):
                pass
        self.names = tuple(json.loads(told["tags"] or "[]"))
        self.by_token = bool(told["max_token_staleness"])
        return told

    def convert(self) -> None:
        """Make a plain task ready to become an indexed one, page by page."""
        while self._run("task/convert", []):
            pass

    def put(
        self,
        producer: str,
        operation: int,
        batch: PutBatch,
        *,
        evict: int | None = None,
    ) -> Request[PutReply]:
        """Return the request that stores groups in one transaction, exactly once.

        Args:
            producer: Who puts.
            operation: Number of this put; counts up by one a put of this producer.
            batch: What to store.
            evict: Make room first by evicting, this many groups at least; None: do not.
        """
        groups = batch.groups
        sizes = [group.nbytes for group in groups]
        samples = sum(group.samples for group in groups)
        pipeline = self.client.transaction(self.keys.none)
        if evict is not None:
            room: list[Argument] = [producer, operation, len(groups), sum(sizes), evict]
            add_to(pipeline, load("put/evict"), self._stream, room, whole=True)
        for group in groups:
            pipeline.add_payload(self._xadd, 6, group.parts, group.nbytes)
        account: list[Argument] = [producer, operation, samples, batch.filtered]
        if self.indexer is None and not batch.needs_index:
            add_to(pipeline, load("put/put"), self._stream, [*account, *sizes], whole=True)
        else:
            indexer = self.indexer or Indexer(Fifo(), ())
            account += [batch.expired, indexer.order_name]
            account += [indexer.by_token(batch), indexer.tags(batch)]
            account += indexer.facts(batch)
            add_to(pipeline, load("put/put_indexed"), self._stream, account, whole=True)
        pipeline.add("EXEC")
        count = len(groups)
        return Request(
            self.client, pipeline, lambda replies: _put_reply(_results(replies)[-1], count)
        )

    def evict(self, producer: str, operation: int, batch: PutBatch, *, least: int) -> int:
        """Make room for a put before it is sent; returns the number of groups evicted.

        At the server's memory limit a put is refused with everything in its transaction. Repeated
        after a broken connection it may evict more.
        """
        nbytes = sum(group.nbytes for group in batch.groups)
        return int(self._run("put/evict", [producer, operation, len(batch), nbytes, least]))

    def room(self, producer: str, sizes: Sequence[int], *, ttl_ms: int) -> tuple[int, str]:
        """Queue for room; returns how many groups may be put now, and what stops the next one.

        Args:
            producer: Who wants to put, and is woken when there is room.
            sizes: Bytes of each group to put.
            ttl_ms: How long the place in the queue, or what was granted, is kept; 0: leave.
        """
        granted, setting = self._run("put/room", [producer, ttl_ms, *sizes])
        return int(granted), setting.decode()

    def take(
        self,
        group: str,
        consumer: str,
        slot: str,
        token: str,
        *,
        count: int,
        least: int,
        waiter: str,
        ttl_ms: int,
        lease_ms: int,
        status: Status = Status.COMPLETED,
        where: str = "",
        first: Ending | None = None,
    ) -> Request[TakeReply]:
        """Return the request that leases `count` groups, or at least `least`, or none, and reads.

        In the same round trip, and before it, another lease of this consumer may end: `first`.
        """
        arguments: list[Argument] = [group, consumer, slot, token, count]
        arguments += [least, waiter, ttl_ms, lease_ms, status, where]
        scripts = [("take/take", arguments)]
        if first is not None:
            scripts.insert(0, ("take/finish", first.arguments(group, consumer)))
        read = ("XREADGROUP", "GROUP", group, slot, "COUNT", count, "STREAMS", self.keys.stream)

        def pipeline(*, whole: bool) -> Pipeline:
            made = Pipeline()
            for name, own in scripts:
                add_to(made, load(name), self._stream, own, whole=whole)
            made.add(*read, "0")
            return made

        def result(replies: list[Reply]) -> TakeReply:
            if any(map(is_missing_script, replies[:-1])):
                replies = self.client.exchange(pipeline(whole=True))
            return _take_reply(replies)

        return Request(self.client, pipeline(whole=False), result)

    def finish(self, group: str, consumer: str, ending: Ending) -> bool:
        """End a lease or a part of it; False when it is another consumer's by now."""
        reply = self._run("take/finish", ending.arguments(group, consumer))
        return bool(reply[0] == b"ok")

    def heartbeat(self, group: str, consumer: str, lease_ms: int) -> tuple[bool, int]:
        """Say that a consumer lives; returns whether it was known, and the groups taken over."""
        known, taken_over = self._run("take/heartbeat", [group, consumer, lease_ms])
        return bool(known), int(taken_over)

    def leave(self, group: str, consumer: str) -> int:
        """Give back what a consumer leases; returns the number of groups."""
        return int(self._run("take/leave", [group, consumer]))

    def join(self, group: str, start: str = "") -> bool:
        """Register a consumer group, page by page; False when the task does not exist.

        Args:
            group: Its name.
            start: "" to see all that is stored, "+" nothing of it, or a seq: from it on, history
                too.

        Raises:
            ConfigError: It is to begin at a seq, and the task is plain.
        """
        outcome = _JOIN_MORE
        while outcome == _JOIN_MORE:
            outcome = self._run("task/join", [group, start])
        if outcome == _JOIN_PLAIN:
            raise ConfigError("only a task with keep= or keep_groups= can be read from an id on.")
        return bool(outcome)

    def count(self, group: str, status: Status, where: str) -> int:
        """Return how many groups wait in a status; changes nothing.

        A consumer group that has not joined is told what it would see.
        """
        total, at = 0, b"0"
        while True:
            found, at = self._run("task/count", [group, status, where, at])
            total += int(found)
            if at == b"0":
                return total

    def move(self, group: str, status: Status, ids: Sequence[int]) -> int:
        """Move waiting groups to another status; returns how many wait there now.

        Atomic for each group: many are moved a part at a time.
        """
        moved = 0
        for start in range(0, len(ids), MOVE_GROUPS):
            part = ids[start : start + MOVE_GROUPS]
            outcome = _MOVE_JOINS
            while outcome < 0:
                outcome = int(self._run("task/move", [group, status, *part]))
                if outcome == _MOVE_PLAIN:
                    self.convert()
            moved += outcome
        return moved

    def rescore(self, order: str, changes: Sequence[tuple[int, float, Score]]) -> int | None:
        """Change priority and score of groups; returns how many are stored.

        None: the task is gone, or has another order than that of the scores.
        """
        flat = [word for seq, priority, score in changes for word in (seq, priority, score)]
        found = int(self._run("task/rescore", [order, *flat]))
        return None if found < 0 else found

    def facts(self, ids: Sequence[int]) -> list[list[str] | None]:
        """Return the facts of groups, in the places that `redrb/lua/include/index.lua` names."""
        members = [f"{seq:016d}" for seq in ids]
        found = self.client.execute("HMGET", f"{self.keys.prefix}facts", *members)
        return [text and text.decode().split() for text in found]

    def expire(
        self,
        group: str,
        limit: int,
        *,
        mode: Literal["keep", "discard", "look"],
        version: int,
        max_staleness: int | None,
        max_token_staleness: int | None,
        statuses: Sequence[Status],
    ) -> tuple[int, tuple[int, ...]] | None:
        """Expire at most `limit` groups, or look which ones would; None: versions are not indexed.

        Returns:
            How many expired, and the ids of those that would.
        """
        rules = ["-" if rule is None else rule for rule in (max_staleness, max_token_staleness)]
        arguments: list[Argument] = [group, limit, mode, version, *rules, *statuses]
        outcome = b"more"
        while outcome == b"more":  # the consumer group joins, page by page
            outcome, *told = self._run("task/expire", arguments)
        if outcome == b"unversioned":
            return None
        return (int(told[0]), tuple(told[1:])) if told else (0, ())

    def discard(self, group: str, ids: Sequence[int]) -> int:
        """Expire these groups where they wait; returns how many."""
        return int(self._run("task/discard", [group, *ids]))

    def settle(self, group: str, trained: Mapping[int, int]) -> int:
        """Acknowledge groups, wherever they are; returns how many were not done.

        Args:
            group: Consumer group.
            trained: Samples of each group, by id.
        """
        return int(
            self._run("task/settle", [group, *itertools.chain.from_iterable(trained.items())])
        )

    def payload(self, seq: int) -> bytes | None:
        """Return a group's bytes; None when it is gone."""
        at = f"{ID_BASE}{seq}"
        entries = self.client.execute("XRANGE", self.keys.stream, at, at)
        return _entry(entries[0])[1] if entries else None

    def read(self, ids: Sequence[int]) -> list[tuple[int, bytes | None, int | None]]:
        """Return id, bytes and time of archiving in ms of groups; None where there is none."""
        self._trim()
        pipeline = Pipeline()
        for seq in ids:
            pipeline.add("XRANGE", self.keys.stream, f"{ID_BASE}{seq}", f"{ID_BASE}{seq}")
            pipeline.add("ZSCORE", f"{self.keys.prefix}archive", f"{seq:016d}")
        replies = self.client.retrying(lambda: self._checked(pipeline))
        return [
            (
                seq,
                _entry(entries[0])[1] if entries else None,
                None if score is None else int(float(score)),
            )
            for seq, entries, score in zip(ids, replies[::2], replies[1::2], strict=True)
        ]

    def archived(self, since: str, after: str, until: str, count: int) -> list[tuple[int, str]]:
        """Return id and time in ms of kept groups, from a time and the group of it before on."""
        self._trim()
        told = self._run("task/archived", [since, after, until, count])
        pairs = zip(told[::2], told[1::2], strict=True)
        return [(int(member), at.decode()) for member, at in pairs]

    def _trim(self) -> None:
        """Delete history whose time is over."""
        while self.indexer is not None and int(self._run("task/trim", [])) >= TRIM_GROUPS:
            pass

    def _checked(self, pipeline: Pipeline) -> list[Reply]:
        replies = self.client.exchange(pipeline)
        error = first_error(replies)
        if error is not None:
            raise error
        return replies

    def current_version(self) -> int | None:
        """Return the newest weight version that the task knows."""
        told = self.client.execute("HGET", f"{self.keys.prefix}task", "version")
        return None if told is None else int(told)

    def versions(self, group: str) -> list[tuple[str, int, int]]:
        """Return groups by version: kind, version (of those taken: staleness), and how many.

        Kinds are `wo wn lo ln to tn`: waiting, leased or taken, by oldest or newest token; and
        `tf tq`, shares of `to`: in flight, in the queue.
        """
        told = self._run("task/versions", [group])
        return [
            (kind.decode(), int(version), int(groups))
            for kind, version, groups in zip(told[::3], told[1::3], told[2::3], strict=True)
        ]

    def expiries(self, group: str, ids: Sequence[int]) -> list[str | None]:
        """Return by what groups expired: "<version> <max_staleness> <max_token_staleness>"."""
        members = [f"{seq:016d}" for seq in ids]
        found = self.client.execute("HMGET", f"{self.keys.prefix}expiries:{group}", *members)
        return [text and text.decode() for text in found]

    def advance(self, version: int) -> int:
        """Tell the task the newest weight version; returns the one that it knows."""
        return int(self._run("task/advance", [version]))

    def drop_group(self, group: str) -> int:
        """Remove a consumer group; returns the number of groups deleted with it."""
        return int(self._run("task/drop_group", [group]))

    def forget_producers(self, names: Sequence[str]) -> None:
        """Forget the last operations of producers that put no more."""
        self.client.execute("HDEL", self.keys.producers, *names)

    def clear(self) -> int:
        """Delete the task; returns the number of groups that were stored."""
        return int(self._run("task/clear", []))

    def stats(self, group: str) -> dict[str, int]:
        """Return the task's counters by name."""
        reply = self._run("task/stats", [group])
        pairs = zip(reply[::2], reply[1::2], strict=True)
        return {name.decode(): int(value) for name, value in pairs}

    def dead_letters(self, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return the newest dead letters, newest first, as Redis holds them."""
        reply = self.client.execute("XREVRANGE", self.keys.dead, "+", "-", "COUNT", count)
        return [(at, dict(zip(flat[::2], flat[1::2], strict=True))) for at, flat in reply]

    def wait_for_wake(self, seconds: float, *waiters: str) -> None:
        """Block until one of `waiters` is woken, `seconds` are over, or the connection breaks."""
        wakes = map(self.keys.wake, waiters)
        try:
            self.client.once("BLPOP", *wakes, f"{max(seconds, _SHORTEST_BLOCK_S):.3f}")
        except RedisError as error:
            if not is_transient(error):
                raise StoreError(f"waiting on {self.client.where} failed: {error}") from error
            # whoever waits looks again, and that request waits for Redis to be back

    def _run(self, name: str, arguments: Sequence[Argument]) -> Reply:
        return run(self.client, load(name), self._stream, arguments)


def _results(replies: list[Reply]) -> list[Reply]:
    """Return what the commands of a transaction returned, or raise the error that stopped it."""
    error = first_error(replies)
    if error is not None:
        raise error
    results: list[Reply] = replies[-1]
    error = first_error(results)
    if error is not None:
        raise error
    return results


def _take_reply(replies: list[Reply]) -> TakeReply:
    *answers, payload = replies
    error = first_error(answers)
    if error is not None:
        raise error
    held = len(answers) == 1 or answers[0][0] == b"ok"
    outcome, *told = answers[-1]
    if outcome != b"taken":  # nothing was leased, so there may be no consumer group to read yet
        amount, blocked, expired, others = (*told, 0, 0, 0, 0)[:4]
        word = outcome.decode()
        if word == "more":
            return TakeReply(word, held=held, expired=amount)
        return TakeReply(word, amount, blocked, held=held, expired=expired, others=others)
    if isinstance(payload, ResponseError):
        raise payload
    entries = list(map(_entry, payload[0][1] if payload else []))
    amount, members, weights = told
    if members:
        by_id = dict(entries)
        entries = [(seq, by_id[seq]) for seq in map(int, members) if seq in by_id]
    if not weights or len(weights) != len(entries) + 1:
        return TakeReply("taken", amount, 0, tuple(entries), held)
    *own, total = map(float, weights)
    return TakeReply("taken", amount, 0, tuple(entries), held, tuple(own), total)


def _put_reply(reply: Reply, count: int) -> PutReply:
    outcome = reply[0].decode()
    if outcome == "ok":
        expired = int(reply[3]) if len(reply) > 3 else 0
        return PutReply(outcome, int(reply[1]), count, int(reply[2]), expired=expired)
    if outcome == "again":
        return PutReply(outcome, last=int(reply[1]), stored=int(reply[2]))
    return PutReply(outcome, setting=reply[1].decode() if outcome == "full" else "")


def _entry(entry: Reply) -> tuple[int, bytes | None]:
    entry_id, fields = entry
    seq = int(entry_id.rpartition(b"-")[2])
    if not fields or len(fields) != 2 or fields[0] != b"g":
        return seq, None
    return seq, fields[1]
