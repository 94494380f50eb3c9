"""What Redis does for one task: a typed function for each script and transaction.

Every function may be repeated with the same arguments when a connection breaks, and is: see the
headers of the scripts in `redrb/lua`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redis.exceptions import RedisError, ResponseError

from redrb.codec import EncodedGroup
from redrb.connection import Client
from redrb.connection.failures import is_missing_script, is_transient
from redrb.connection.request import Request
from redrb.connection.transport import Argument, Pipeline, Reply, first_error, packed
from redrb.errors import StoreError, TaskMismatch
from redrb.keys import TaskKeys
from redrb.scripts import add_to, load, run

WIRE_FORMAT = 1


@dataclass(frozen=True, slots=True)
class PutReply:
    """What became of a put.

    Attributes:
        outcome: "ok", "again" (an earlier attempt landed), "full", "never" or "gone".
        last: Id of the last group stored.
        stored: Groups stored; by an earlier attempt it may be another number.
        room: Groups that may still be put; -1 without a limit.
        setting: What leaves no room when it is full: "limit" or "max_bytes".
    """

    outcome: str
    last: int = 0
    stored: int = 0
    room: int = -1
    setting: str = ""


@dataclass(frozen=True, slots=True)
class TakeReply:
    """What became of a take.

    Attributes:
        outcome: "taken", "short", "never" or "gone".
        amount: Groups leased, groups waiting, or the limit, as `outcome` says.
        blocked: Producers that wait for room, where too few groups are waiting.
        entries: Id and payload of each group, in order of arrival; None where it is gone.
        held: False when the lease to be ended first is another consumer's by now.
    """

    outcome: str
    amount: int = 0
    blocked: int = 0
    entries: tuple[tuple[int, bytes | None], ...] = ()
    held: bool = True


@dataclass(frozen=True, slots=True)
class Ending:
    """How groups of a lease end.

    Attributes:
        slot: The lease's slot.
        token: The lease's token.
        outcome: "ack", "release", "fail" or "reject".
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
    """One task's keys on one client."""

    def __init__(self, client: Client, task: str, keys: TaskKeys) -> None:
        self.client = client
        self.task = task
        self.keys = keys
        self._stream = [keys.stream]
        self._xadd = packed("XADD", keys.stream, "NOMKSTREAM", "*", "g")

    def open(self, settings: Mapping[str, str]) -> dict[str, str]:
        """Create the task or check its settings; returns all of them.

        Raises:
            TaskMismatch: It exists with others.
        """
        flat = [word for item in settings.items() for word in item]
        head, *reply = self._run("open", flat)
        told = {
            name.decode(): value.decode() if value is not None else ""
            for name, value in zip(reply[::2], reply[1::2], strict=True)
        }
        if head == b"differs":
            raise TaskMismatch(self.task, {name: (told[name], settings.get(name)) for name in told})
        return told

    def put(
        self,
        producer: str,
        operation: int,
        groups: Sequence[EncodedGroup],
        *,
        evict: int | None = None,
    ) -> Request[PutReply]:
        """Return the request that stores groups in one transaction, exactly once.

        Args:
            producer: Who puts.
            operation: Number of this put; counts up by one a put of this producer.
            groups: What to store.
            evict: Make room first by evicting, this many groups at least; None: do not.
        """
        sizes = [group.nbytes for group in groups]
        samples = sum(group.samples for group in groups)
        pipeline = Pipeline()
        pipeline.add("MULTI")
        if evict is not None:
            room: list[Argument] = [producer, operation, len(groups), sum(sizes), evict]
            add_to(pipeline, load("evict"), self._stream, room, whole=True)
        for group in groups:
            pipeline.add_payload(self._xadd, 6, group.parts, group.nbytes)
        account: list[Argument] = [producer, operation, samples, *sizes]
        add_to(pipeline, load("put"), self._stream, account, whole=True)
        pipeline.add("EXEC")
        count = len(groups)
        return Request(
            self.client, pipeline, lambda replies: _put_reply(_results(replies)[-1], count)
        )

    def evict(
        self, producer: str, operation: int, groups: Sequence[EncodedGroup], *, least: int
    ) -> int:
        """Make room for a put before it is sent; returns the number of groups evicted.

        At the server's memory limit a put is refused with everything in its transaction. Repeated
        after a broken connection it may evict more.
        """
        nbytes = sum(group.nbytes for group in groups)
        return int(self._run("evict", [producer, operation, len(groups), nbytes, least]))

    def room(self, producer: str, sizes: Sequence[int], *, ttl_ms: int) -> tuple[int, str]:
        """Queue for room; returns how many groups may be put now, and what stops the next one.

        Args:
            producer: Who wants to put, and is woken when there is room.
            sizes: Bytes of each group to put.
            ttl_ms: How long the place in the queue, or what was granted, is kept; 0: leave.
        """
        granted, setting = self._run("room", [producer, ttl_ms, *sizes])
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
        first: Ending | None = None,
    ) -> Request[TakeReply]:
        """Return the request that leases `count` groups, or at least `least`, or none, and reads.

        In the same round trip, and before it, another lease of this consumer may end: `first`.
        """
        arguments: list[Argument] = [group, consumer, slot, token, count]
        arguments += [least, waiter, ttl_ms, lease_ms]
        scripts = [("take", arguments)]
        if first is not None:
            scripts.insert(0, ("finish", first.arguments(group, consumer)))
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
        reply = self._run("finish", ending.arguments(group, consumer))
        return bool(reply[0] == b"ok")

    def heartbeat(self, group: str, consumer: str, lease_ms: int) -> tuple[bool, int]:
        """Say that a consumer lives; returns whether it was known, and the groups taken over."""
        known, taken_over = self._run("heartbeat", [group, consumer, lease_ms])
        return bool(known), int(taken_over)

    def leave(self, group: str, consumer: str) -> int:
        """Give back what a consumer leases; returns the number of groups."""
        return int(self._run("leave", [group, consumer]))

    def join(self, group: str) -> bool:
        """Register a consumer group; False when the task does not exist."""
        return bool(self._run("join", [group]))

    def drop_group(self, group: str) -> int:
        """Remove a consumer group; returns the number of groups deleted with it."""
        return int(self._run("drop_group", [group]))

    def forget_producers(self, names: Sequence[str]) -> None:
        """Forget the last operations of producers that put no more."""
        self.client.execute("HDEL", self.keys.producers, *names)

    def clear(self) -> int:
        """Delete the task; returns the number of groups that were stored."""
        return int(self._run("clear", []))

    def stats(self, group: str) -> dict[str, int]:
        """Return the task's counters by name."""
        reply = self._run("stats", [group])
        pairs = zip(reply[::2], reply[1::2], strict=True)
        return {name.decode(): int(value) for name, value in pairs}

    def dead_letters(self, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return the newest dead letters, newest first, as Redis holds them."""
        reply = self.client.execute("XREVRANGE", self.keys.dead, "+", "-", "COUNT", count)
        return [(at, dict(zip(flat[::2], flat[1::2], strict=True))) for at, flat in reply]

    def wait_for_wake(self, waiter: str, seconds: float) -> None:
        """Block until `waiter` is woken, or `seconds` are over, or the connection breaks."""
        try:
            self.client.once("BLPOP", self.keys.wake(waiter), f"{max(seconds, 0.001):.3f}")
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
    outcome, *amounts = answers[-1]
    amount, blocked = (*amounts, 0, 0)[:2]
    if outcome != b"taken":  # nothing was leased, so there may be no consumer group to read yet
        return TakeReply(outcome.decode(), amount, blocked, held=held)
    if isinstance(payload, ResponseError):
        raise payload
    entries = payload[0][1] if payload else []
    return TakeReply("taken", amount, 0, tuple(map(_entry, entries)), held)


def _put_reply(reply: Reply, count: int) -> PutReply:
    outcome = reply[0].decode()
    if outcome == "ok":
        return PutReply(outcome, last=int(reply[1]), stored=count, room=int(reply[2]))
    if outcome == "again":
        return PutReply(outcome, last=int(reply[1]), stored=int(reply[2]))
    return PutReply(outcome, setting=reply[1].decode() if outcome == "full" else "")


def _entry(entry: Reply) -> tuple[int, bytes | None]:
    entry_id, fields = entry
    seq = int(entry_id.rpartition(b"-")[2])
    if not fields or len(fields) != 2 or fields[0] != b"g":
        return seq, None
    return seq, fields[1]
