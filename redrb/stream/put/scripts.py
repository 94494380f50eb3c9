"""Runs the scripts of `redrb/lua/put`: groups are stored exactly once, or wait for room.

Every request is repeated with the same arguments when a connection breaks; the headers of the
scripts say why that is safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from redrb.connection.request import Request
from redrb.connection.transport import Argument, Pipeline, Reply, first_error, packed
from redrb.damage import Reading
from redrb.errors import StoreError
from redrb.lua.scripts import add_to, load, scripted_request
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.indexing import index_arguments
from redrb.stream.put.replication import Replication
from redrb.stream.task.entries import ID_BASE
from redrb.stream.task.origin import OriginState
from redrb.stream.task.task import Task

if TYPE_CHECKING:
    from redrb.stream.put.pending import PendingPut

MOST_EVICTED = 32
"""Most groups that one call evicts, unless its put has more: a lowered limit needs several."""

PutOutcome: TypeAlias = Literal[
    "ok",
    "again",
    "full",
    "never",
    "gone",
    "changed",
    "forgotten",
    "more",
    "memory",
    "known",
    "past",
    "ended",
]


@dataclass(frozen=True, slots=True)
class PutReply:
    """The reply to a put.

    Attributes:
        outcome: "ok"; "again": an earlier attempt was stored; "full"; "never": the groups exceed
            the limits even when nothing is stored; "gone": the task was deleted; "changed": the
            groups were prepared for other settings than the task's; "forgotten": the task has no
            record of the producer, and the put names an old epoch; "more": history that
            gives way to the put, or entries of failed puts, are being removed, and the put is
            to be sent again after `Trim`; "memory": the server is at its
            memory limit; "ended": the parts of the group have become another group, or none.
        last: Id of the last group stored; with "ended", of the group that the parts have become,
            or 0.
        stored: Groups stored; an earlier attempt may have stored another number.
        room: Groups that may still be put; -1 without a limit.
        setting: The setting that leaves no room: "limit", "rate" or "max_bytes".
        expired: Groups that were too stale on arrival.
        epoch: With "forgotten", the epoch of now.
        backlog: Groups stored now, history included; -1 in a task without partitions.
        origin: With "past", the row of the origin.
    """

    outcome: PutOutcome
    last: int = 0
    stored: int = 0
    room: int = -1
    setting: str = ""
    expired: int = 0
    epoch: int = 0
    backlog: int = -1
    origin: bytes = b""


class RoomReply(NamedTuple):
    """How many groups may be put now, and the setting that leaves no room for more."""

    granted: int
    setting: str


class PutScripts:
    """Runs the scripts of producers on one task."""

    def __init__(self, task: Task, replication: Replication) -> None:
        """Prepare.

        Args:
            task: The task.
            replication: Lets replicas confirm puts.
        """
        self._task = task
        self._replication = replication
        self._store = task.store
        self._known = False
        self._xadd = packed("XADD", task.store.keys.stream, "NOMKSTREAM", "*", "g")

    @property
    def replicated(self) -> bool:
        """Whether puts count only when replicas have confirmed them."""
        return self._replication.min_replicas > 0

    def put(
        self,
        put: PendingPut,
        batch: PutBatch,
        *,
        evict: int | None = None,
    ) -> Request[PutReply]:
        """Return the request that stores groups in one transaction, exactly once.

        Args:
            put: The put that the groups belong to; it has a number.
            batch: The groups.
            evict: Least number of groups to evict first; None: evict nothing.
        """
        store, groups = self._store, batch.groups
        nbytes = sum([group.nbytes for group in groups])
        samples = sum([group.samples for group in groups])
        account: list[Argument] = [*_named(put), samples, nbytes, batch.filtered]
        account += index_arguments(self._task.description, batch)
        room: list[Argument] = []
        if evict is not None:
            room = [*_named(put), len(groups), nbytes, evict, MOST_EVICTED]

        def pipeline(*, whole: bool) -> Pipeline:
            made = store.client.transaction(store.keys.none)
            if room:
                add_to(made, load("put/evict"), store.script_keys, room, whole=whole)
            for group in groups:
                made.add_payload(self._xadd, 6, [group.blob], group.nbytes)
            add_to(made, load("put/put"), store.script_keys, account, whole=whole)
            made.add("EXEC")
            self._replication.add_to(made)
            return made

        def result(replies: list[Reply]) -> PutReply:
            done, confirmed = self._replication.divide(replies)
            results = transaction_results(done)
            reply = _put_reply(results[-1], len(groups))
            if groups and reply.outcome == "ok":
                self._check_ids(results[-2], reply.last)
            if reply.outcome in ("ok", "again", "known", "ended"):
                self._replication.check(confirmed)
            return reply

        first, self._known = not self._known, True  # the first put brings the text of the script
        # where a script is missing all the same, the next attempt removes the entries of this one
        return scripted_request(store.client, pipeline, result, whole=first)

    def _check_ids(self, stored: bytes | None, counted: int) -> None:
        """Compare the ids that the stream has given to groups with those that the task counts.

        Raises:
            StoreError: They differ: the stream is lost, or the task's last id is wrong.
        """
        if stored != f"{ID_BASE}{counted}".encode():
            raise StoreError(
                f"task {self._store.task!r} counts groups that its stream does not hold, so this "
                f"put is not stored: run `redrb doctor {self._store.task} --repair`, and put again."
            )

    def find_stored(self, put: PendingPut) -> PutReply | None:
        """Return the reply of an earlier attempt that was stored; None if none was."""
        client, keys = self._store.client, self._store.keys
        record = client.execute("HGET", keys.puts, put.identity.name)
        with Reading(f"the record of producer {put.identity.name}"):
            operation, last, count = map(int, record.split()[:3]) if record else (0, 0, 0)
        stored = operation == put.identity.operation
        return PutReply("again", last=last, stored=count) if stored else None

    def evict(self, put: PendingPut, batch: PutBatch, *, least: int) -> tuple[bool, int]:
        """Make room for a put before it is sent, with bounded work.

        At the server's memory limit the whole transaction of a put is refused, with its evictions.
        A call that is repeated after a broken connection may evict more.

        Returns:
            Whether another call may evict more, and the number of groups evicted.
        """
        nbytes = sum(group.nbytes for group in batch.groups)
        asked: list[Argument] = [*_named(put), len(batch.groups), nbytes, least, MOST_EVICTED]
        outcome, evicted = self._store.run("put/evict", asked)
        return bool(outcome == b"more"), int(evicted)

    def room(self, producer: str, sizes: Sequence[int], *, ttl_ms: int) -> RoomReply:
        """Queue for room; see `ask_room`."""
        return self.ask_room(producer, sizes, ttl_ms=ttl_ms).result()

    def ask_room(self, producer: str, sizes: Sequence[int], *, ttl_ms: int) -> Request[RoomReply]:
        """Return the request that queues for room.

        Args:
            producer: The producer that is woken when there is room.
            sizes: Bytes of each group to put.
            ttl_ms: How long the place in the queue or the granted room is kept; 0: leave the queue.
        """

        def read(reply: Reply) -> RoomReply:
            granted, setting = reply
            return RoomReply(int(granted), setting.decode())

        return self._store.raw_request("put/room", [producer, ttl_ms, *sizes], read)

    def epoch(self) -> int:
        """Return the epoch of the task's records of producers."""
        puts = self._store.keys.puts
        stored = self._store.client.execute("HGET", puts, "epoch")
        with Reading("the epoch of the records of producers"):
            return int(stored or 0)

    def sources(
        self, origin: str, incarnation: str, seqs: Sequence[int]
    ) -> list[tuple[int, str] | None]:
        """Return the id and the digest that the task has recorded of each source, if it has."""
        prefix, made = self._store.keys.prefix, Pipeline()
        made.add("HGET", f"{prefix}sources", origin)
        made.add("HMGET", f"{prefix}sources:{origin}", *seqs)
        row, records = self._store.exchange(made)
        with Reading("the records of forwarded groups"):
            if row is None or row.split()[0].decode() != incarnation:
                return [None] * len(seqs)
            split = [record and record.decode().split() for record in records]
            return [words and (int(words[0]), words[1]) for words in split]

    def adopt(self, origin: str, row: bytes, state: OriginState) -> None:
        """Replace the row of an origin, unless another process has done so."""
        said: list[Argument] = [state.incarnation, state.floor, ",".join(state.kept)]
        self._store.run("put/adopt", [origin, row, *said])

    def forget(self, producers: Sequence[str]) -> None:
        """Delete the last operation numbers of producers that put no more."""
        self._store.client.execute("HDEL", self._store.keys.puts, *producers)


def _named(put: PendingPut) -> list[Argument]:
    """Return the arguments by which the scripts know a put and its repetitions."""
    return [put.identity.name, put.identity.operation, put.epoch]


def transaction_results(replies: list[Reply]) -> list[Reply]:
    """Return the replies inside a transaction, or raise the error that stopped it."""
    error = first_error(replies)
    if error is not None:
        raise error
    results: list[Reply] = replies[-1]
    error = first_error(results)
    if error is not None:
        raise error
    return results


def _put_reply(reply: Reply, count: int) -> PutReply:
    outcome: PutOutcome = reply[0].decode()
    if outcome == "ok":
        last, room, expired, backlog = map(int, reply[1:])
        return PutReply(outcome, last, count, room, expired=expired, backlog=backlog)
    if outcome == "again":
        return PutReply(outcome, last=int(reply[1]), stored=int(reply[2]))
    if outcome == "ended":
        return PutReply(outcome, last=int(reply[1] or 0))
    if outcome == "forgotten":
        return PutReply(outcome, epoch=int(reply[1]))
    if outcome == "past":
        return PutReply(outcome, origin=reply[1])
    return PutReply(outcome, setting=reply[1].decode() if outcome == "full" else "")
