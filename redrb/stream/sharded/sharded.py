"""`ShardedStream`: the tasks `math@0`, `math@1` and so on, used as one stream."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, TypeAlias

from redrb.checks import checked_int
from redrb.connection import Client, check_client
from redrb.connection.deadline import SHORT_OUTAGE_S, Deadline, here
from redrb.errors import (
    BatchTimeout,
    ConfigError,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from redrb.experience import BufferItem, Status
from redrb.keys import MOST_SHARDS
from redrb.scopes import Closing
from redrb.stream.arguments import AnyStatus
from redrb.stream.mixture.lease import MixtureLease
from redrb.stream.mixture.mixture import release
from redrb.stream.options import LEASE_MS
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.options import PutOptions
from redrb.stream.put.pending import CHUNK_GROUPS, PendingPut
from redrb.stream.put.preparer import Groups, Items, groups_of, groups_of_many
from redrb.stream.put.room import OnFull
from redrb.stream.sharded.shards import Shard, Shards
from redrb.stream.stream import ExperienceStream
from redrb.stream.take.calls import TakeReply, TakeRequest
from redrb.stream.take.lease import Lease
from redrb.stream.take.taker import Taker
from redrb.stream.task.ledger import StreamStats, summed
from redrb.stream.task.store import QUEUE_TTL_MS
from redrb.words import counted

Ids: TypeAlias = tuple[tuple[str, int], ...]
"""Task and id of each group."""


class _Put:
    """Groups that are put, up to 32 into a shard."""

    def __init__(self, batch: PutBatch) -> None:
        self.batch, self.over = batch, not batch
        self.done = 0  # groups, from the first, that are stored or were dropped
        self.stored: list[tuple[str, int]] = []
        self.refusal: StoreFull | None = None

    @property
    def piece(self) -> PutBatch:
        """The next groups."""
        return self.batch.part(self.done, min(self.done + CHUNK_GROUPS, len(self.batch.groups)))

    def refuse(self) -> None:
        """Raise the refusal, which is kept no more: it holds the frames of all callers."""
        refusal, self.refusal = self.refusal, None
        try:
            if refusal is not None:
                raise refusal
        finally:
            del refusal


class _Batch:
    """A batch that a take collects; its parts are leased, and released if it stays incomplete."""

    def __init__(self, request: TakeRequest, waiter: str = "") -> None:
        self.request = request
        self.waiter = waiter or f"take-{uuid.uuid4().hex}"  # its name in the queues of shards
        self.leases: list[Lease] = []
        self.replies: dict[int, TakeReply] = {}  # shard -> its last reply
        self.queued: dict[int, int] = {}  # shard -> groups for which the take waits there
        self.expired = 0

    @property
    def missing(self) -> int:
        """Groups that the full batch lacks."""
        return self.request.count - sum(map(len, self.leases))

    @property
    def lacks(self) -> bool:
        """Whether it has fewer groups than the take accepts."""
        return self.missing > self.request.count - self.request.least

    def asked(self, count: int, least: int) -> TakeRequest:
        """Return the request for a part of it."""
        return TakeRequest(count, least, self.request.status, self.request.where)

    def take_of(self, taker: Taker, asked: TakeRequest, ttl_ms: int) -> TakeReply:
        """Lease groups of one task, or queue there; returns the last reply."""
        search, again = None, True
        while again:
            reply, lease = taker.take_once(asked, waiter=self.waiter, search=search, ttl_ms=ttl_ms)
            if lease is not None:
                self.leases.append(lease)
            self.expired += reply.expired
            taker.accept(asked, reply)
            search = reply.search
            again = reply.outcome in ("gone", "more") and not here().pages_over
        return reply

    def release(self) -> None:
        """Requeue the groups; nothing waits longer for a server that is away."""
        leases, self.leases = self.leases, []
        with Deadline(SHORT_OUTAGE_S):
            release(leases)


class ShardedStream(Closing):
    """One stream over several tasks, its shards, which lie on different nodes of a cluster.

    Each shard is an ordinary task with settings, ledger and limits of its own. A put goes to one
    shard, in turn, or, of many groups, 32 to each; a shard that is full or away is left out. A take
    collects its batch from the shards in turn, in whatever shares wait, so the order of the task
    holds within each shard. The guarantees are those of `ExperienceStream`, shard by shard.

    Examples:
        >>> stream = ShardedStream(client, "math", shards=6, limit=512)
        >>> stream.put(items, policy_version=7)
        >>> with stream.take(32, timeout=30) as lease:
        ...     train(lease.batch())
    """

    def __init__(
        self,
        client: Client,
        task: str,
        *,
        shards: int,
        namespace: str = "default",
        group: str = "default",
        on_full: OnFull = "block",
        lease_ms: int = LEASE_MS,
        **options: Any,
    ) -> None:
        """Open the shards, and create those that are new.

        Shards that cannot be reached are opened later, as long as one can be reached now.

        Args:
            client: The client that `redrb.connect` returned.
            task: Name of the whole; the shards are the tasks `<task>@0`, `<task>@1` and so on.
            shards: How many; every process gives the same number.
            namespace, group, on_full, lease_ms: As for `ExperienceStream`.
            options: Its other arguments, the settings among them: those of each shard, so that
                `limit=512` with six shards is 3,072 groups.

        Raises:
            ConfigError: A name, number or setting is not usable.
            TaskMismatch: The task has another number of shards, or a shard other settings.
            StoreUnavailable: Redis stayed away.
        """
        check_client(client)
        count = checked_int("shards", shards, 1, MOST_SHARDS)
        self.task, self.namespace, self.group = task, namespace, group
        self._client, self._blocks = client, on_full == "block"
        self._where: dict[str, Any] = {"namespace": namespace, "group": group, "lease_ms": lease_ms}
        self._shards = Shards(client, task, count, self._where | {"on_full": on_full} | options)
        self._turn: Shard | None = None

    def __repr__(self) -> str:
        return f"<redrb.ShardedStream {self.namespace}:{self.task}, {len(self._shards)} shards>"

    def __bool__(self) -> bool:
        """Return True, however many groups wait."""
        return True

    def __len__(self) -> int:
        """Return the number of groups that wait for this consumer group, where shards answer."""
        return self.stats().ledger.waiting

    @property
    def shards(self) -> dict[str, ExperienceStream]:
        """The open shards by name: ordinary streams, for what is about groups of one of them."""
        return {shard.task: shard for shard in self._shards.opened}

    @property
    def away(self) -> list[str]:
        """Names of the shards that could not be reached lately, and are left out."""
        return self._shards.away

    def stats(self) -> StreamStats:
        """Return the sum of the counters of all shards that can be reached; `away` names others.

        Each shard counts at one moment, one after the other.

        Raises:
            StoreUnavailable: No shard could be reached.
        """
        return summed(list(self._shards.ask(lambda shard: shard.stats()).values()))

    def close(self) -> None:
        """Close the shards: their leased groups are requeued. The client stays open.

        Raises:
            StoreUnavailable: It names the shards that could not be reached; call again later.
        """
        self._shards.close(*([self._turn] if self._turn else []))

    # put

    def put(self, items: Items, *, timeout: float | None = None, **options: Any) -> Ids:
        """Store experience, exactly once however often the request is repeated.

        It is put into the next shard that has room and can be reached. A put that may have reached
        a shard stays with that shard.

        Args:
            items: As for `ExperienceStream.put`.
            timeout: Seconds to wait for room in any shard with `on_full="block"`.
            options: Its policy_version, priority, status and tags. No `admission`: rights are those
                of one shard, and for puts into this shard.

        Returns:
            Task and id of each group that passed the filters, in order.

        Raises:
            StoreFull: No shard had room in time.
            StoreUnavailable: No shard could be reached; or one that may have stored the groups.
            As `ExperienceStream.put`. `stored` says how many groups, from the first, are stored.
        """
        return self._put(groups_of(items), options, timeout)

    def put_many(
        self,
        groups: Sequence[Sequence[BufferItem]],
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> Ids:
        """Store several groups, each visible as a whole, up to 32 to a shard.

        Arguments, result and errors are those of `put`.
        """
        return self._put(groups_of_many(groups), options, timeout)

    def _put(self, groups: Groups, options: dict[str, Any], timeout: float | None) -> Ids:
        if options.pop("admission", None) is not None:
            raise ConfigError("admission: rights are those of one shard; put into that shard.")
        put = _Put(self._shards.opened[0].prepared(groups, PutOptions.checked(**options)))
        try:
            with Deadline(timeout):
                while not put.over:
                    put.refusal = None
                    if not any(self._put_into(number, put) for number in self._shards.tries()):
                        self._await_room(put)
        except (StoreError, ConfigError) as error:
            error.stored = len(put.stored)
            raise
        return tuple(put.stored)

    def _put_into(self, number: int, put: _Put, pending: PendingPut | None = None) -> bool:
        """Put the next groups into a shard; returns whether it took any.

        It does not wait, unless an attempt may still arrive: then the groups stay with this shard.
        """
        before = put.done
        try:
            with self._shards.asking(number, math.inf):
                shard = self._shards[number]
                pending = pending or shard.new_put(put.piece)
                groups = len(pending.batch.groups)
                try:
                    try:
                        with Deadline(0.0, repeat_s=self._shards.outage_s):
                            shard.producer.finish(pending)
                    except (StoreFull, StoreUnavailable):
                        if not pending.repeated or here().over:
                            raise
                        shard.producer.finish(pending)
                finally:
                    shard.producer.abandon(pending)
                    put.done += len(pending.ids)
                    put.stored += [(shard.task, seq) for seq in pending.ids]
                put.done = before + groups
                put.over = put.done == len(put.batch.groups)
                return True
        except StoreFull as error:
            put.refusal = error.with_traceback(None)
        except StoreUnavailable as error:
            if pending is not None and pending.repeated:
                error.add_note(f"Task {self._shards.names[number]!r} may have stored the groups.")
                raise
        return put.done > before

    def _await_room(self, put: _Put) -> None:
        """Queue for room in all shards at once, and put into the first one that has some."""
        if put.refusal is None:  # a shard was reached by another thread
            return
        if not self._blocks:
            put.refuse()
        places: dict[int, PendingPut] = {}
        try:
            while True:
                for number in self._shards.tries():
                    if self._granted(number, places, put):
                        self._put_into(number, put, places.pop(number))
                        return
                if here().over:
                    put.refuse()
                shards = counted(len(self._shards), "shard")
                here().log(
                    f"task {self.task!r} has no room in {shards}: a put waits", self.namespace
                )
                self._shards.wait({at: pending.identity.name for at, pending in places.items()})
        finally:
            with Deadline(SHORT_OUTAGE_S):
                for number, pending in places.items():
                    producer = self._shards[number].producer
                    with suppress(StoreError):  # the place ends by itself
                        producer.ask_room(pending, ttl_ms=0).result()
                    producer.abandon(pending)

    def _granted(self, number: int, places: dict[int, PendingPut], put: _Put) -> bool:
        """Queue in a shard, or keep the place; returns whether it has room for a group now."""
        with suppress(StoreUnavailable), self._shards.asking(number):
            shard = self._shards[number]
            if number not in places:
                places[number] = shard.new_put(put.piece)
            return shard.producer.ask_room(places[number], ttl_ms=QUEUE_TTL_MS).result().granted > 0
        return False

    # take

    def take(
        self,
        count: int,
        *,
        timeout: float | None = None,
        at_least: int | None = None,
        ack: MixtureLease | None = None,
        status: AnyStatus = Status.COMPLETED,
        where: Mapping[str, Any] | None = None,
    ) -> MixtureLease:
        """Lease exactly `count` groups of all shards together, or none.

        Delivery is at least once, as for `ExperienceStream.take`. A take that finds too few groups
        waits for its turn: one take of a consumer group at a time collects what comes to any shard,
        so two takes never hold groups that the other one needs.

        Args:
            count, timeout, at_least, status, where: As for `ExperienceStream.take`.
            ack: The lease before this one: acknowledged first, also when the take times out.

        Raises:
            BatchTimeout: Too few groups came in time; none was taken. Its notes name the shards
                that could not be reached.
            LeaseLost: Another consumer holds groups of `ack` by now; nothing was taken.
            ConfigError: The shards can never hold so many groups, or an argument is not usable.
            StoreUnavailable: No shard could be reached; or too few groups wait, and the node that
                keeps the turns stayed away, for the time of the take or the client.
        """
        batch = _Batch(self._shards.opened[0].request(count, at_least, status, where))
        with Deadline(timeout), ExitStack() as scope:
            for shard in self._shards.opened:
                scope.enter_context(shard.worker.steps.fetching())
            if ack:
                ack.ack()
            try:
                self._sweep(batch)
                if batch.missing and not here().over:
                    for shard in self._shards.opened:
                        scope.enter_context(shard.worker.waiting("batch"))
                    self._wait(batch)
                if batch.lacks:
                    raise self._timeout(batch)
            except BaseException:
                batch.release()
                raise
        return MixtureLease([part for lease in batch.leases for part in lease.parts])

    def _sweep(self, batch: _Batch, share: int = 0, ttl_ms: int = 0) -> bool:
        """Take what waits in each shard in turn, or just `share` groups of each, until it is full.

        Args:
            ttl_ms: How long to queue in a shard that has fewer than `share` groups.

        Returns:
            Whether groups were leased.
        """
        before = batch.missing
        for number in self._shards.tries():
            if not batch.missing:
                break
            least = min(share, batch.missing) or 1
            asked = batch.asked(least if share else batch.missing, least)
            with suppress(StoreUnavailable), self._shards.asking(number):
                self._take_some(number, batch, asked, ttl_ms)
        return batch.missing < before

    def _take_some(self, number: int, batch: _Batch, asked: TakeRequest, ttl_ms: int) -> None:
        """Lease groups of one shard, or queue there."""
        batch.queued[number] = asked.least
        reply = batch.replies[number] = batch.take_of(self._shards[number].taker, asked, ttl_ms)
        if reply.outcome == "taken" or not ttl_ms:
            batch.queued.pop(number, None)

    def _wait(self, batch: _Batch) -> None:
        """Collect groups as they come, in this take's turn, while there is time."""
        gives_up = math.inf
        while batch.missing and not here().over:
            try:
                turn = self._await_turn(batch)
            except StoreUnavailable:  # take what is there, and ask again
                self._sweep(batch)
                gives_up = min(gives_up, time.monotonic() + self._client.retry_s)
                if here().over or time.monotonic() >= gives_up:
                    if batch.lacks:
                        raise
                    return
                if batch.missing:
                    batch.release()  # another take may need these groups
                continue
            gives_up = math.inf
            try:
                if turn.leases:
                    self._collect(batch)
            finally:
                self._leave(batch)
                turn.release()
        if batch.missing:
            self._sweep(batch)

    def _collect(self, batch: _Batch) -> None:
        """Collect groups as they come, while there is time."""
        while batch.missing and not here().over:
            # while no shard has its part of the missing groups, all have too few together
            if self._sweep(batch, -(-batch.missing // len(self._shards)), QUEUE_TTL_MS):
                continue
            groups = counted(batch.request.count, "group", "are")
            waiting = f"{batch.request.count - batch.missing} of {groups} waiting"
            where = f"{len(self._shards)} shards"
            here().log(f"task {self.task!r}: {waiting} in {where}", self.namespace)
            self._shards.wait(dict.fromkeys(batch.queued, batch.waiter))

    def _leave(self, batch: _Batch) -> None:
        """Leave the queues of all shards, so that others need not wait until the places expire."""
        extra = _Batch(batch.request, batch.waiter)
        with Deadline(SHORT_OUTAGE_S):
            for number, share in batch.queued.items():
                with suppress(StoreError):  # the place ends by itself
                    self._take_some(number, extra, batch.asked(share, share), 0)
        batch.queued.clear()
        extra.release()  # groups that came in the meantime

    def _await_turn(self, batch: _Batch) -> _Batch:
        """Lease the turn of this consumer group, the only group of a task, while there is time.

        Each look that does not find it puts it, which is refused as long as it is there: nothing
        that happens to it ends the waits of all takes.
        """
        turn = _Batch(TakeRequest(1, 1, Status.COMPLETED, ""))
        with Deadline(repeat_s=SHORT_OUTAGE_S):
            if self._turn is None:
                self._turn = Shard(
                    self._client,
                    f"{self.task}@turn",
                    limit=1,
                    max_deliveries=1 << 30,
                    on_full="error",
                    **self._where,
                )
            while True:
                over = here().over
                turn.take_of(self._turn.taker, turn.request, 0 if over else QUEUE_TTL_MS)
                if over or turn.leases:
                    return turn
                with suppress(StoreFull):  # it is there: another take has it
                    self._turn.put([BufferItem(None, None)])
                batch.release()  # the take whose turn it is may need these groups
                here().log(f"task {self.task!r}: a take waits for its turn", self.namespace)
                self._turn.wait(turn.waiter)

    def _timeout(self, batch: _Batch) -> BatchTimeout:
        """Return the error of a take whose time is up; it names the shards that are away."""
        replies = batch.replies.values()
        error = BatchTimeout(
            task=self.task,
            namespace=self.namespace,
            wanted=batch.request.least,
            available=batch.request.count - batch.missing,
            waited_s=here().waited_s,
            blocked=sum(reply.blocked for reply in replies),
            expired=batch.expired,
            others=sum(reply.others for reply in replies),
        )
        if self.away:
            error.add_note(f"Not reached: tasks {', '.join(self.away)}. Check their servers.")
        return error
