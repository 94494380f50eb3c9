"""`ShardedStream`: the tasks `math@0`, `math@1` and so on, used as one stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from redrb.checks import checked_int, checked_timeout
from redrb.connection import Client, check_client
from redrb.connection.deadline import SHORT_OUTAGE_S, Deadline, here
from redrb.errors import (
    BatchTimeout,
    ConfigError,
    LeaseLost,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from redrb.experience import BufferItem, Status
from redrb.scopes import Closing
from redrb.stream.arguments import AnyStatus
from redrb.stream.mixture.lease import MixtureLease
from redrb.stream.mixture.mixture import release
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.options import PutOptions
from redrb.stream.put.pending import CHUNK_GROUPS, PendingPut
from redrb.stream.put.preparer import Groups, Items, groups_of, groups_of_many
from redrb.stream.put.room import OnFull
from redrb.stream.sharded.shards import Shard, Shards
from redrb.stream.stream import ExperienceStream
from redrb.stream.take.calls import TakeReply, TakeRequest
from redrb.stream.take.lease import Lease
from redrb.stream.task.ledger import StreamStats
from redrb.stream.task.store import QUEUE_TTL_MS
from redrb.stream.task.wakes import wait_for_any
from redrb.words import counted

MOST_SHARDS = 1024


class _Batch:
    """A batch that a take collects; its parts are leased, and released if it stays incomplete."""

    def __init__(self, request: TakeRequest) -> None:
        self.request = request
        self.waiter = f"take-{uuid.uuid4().hex}"  # its name in the queues of shards
        self.leases: list[Lease] = []
        self.short: dict[int, TakeReply] = {}  # shard -> its last reply, if it had too few groups
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

    def release(self) -> None:
        """Requeue the groups."""
        leases, self.leases = self.leases, []
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
        **options: Any,
    ) -> None:
        """Open the shards, and create those that are new.

        Shards that cannot be reached are opened later, as long as one can be reached now.

        Args:
            client: The client that `redrb.connect` returned.
            task: Name of the whole; the shards are the tasks `<task>@0`, `<task>@1` and so on.
            shards: How many; every process gives the same number.
            namespace, group, on_full: As for `ExperienceStream`.
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
        opened = {"group": group, "on_full": on_full, **options}
        self._lease_ms = {name: options[name] for name in ("lease_ms",) if name in options}
        self._shards = Shards(client, task, count, namespace, opened)
        self._turn: ExperienceStream | None = None

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
        return StreamStats.summed(list(self._shards.ask(lambda shard: shard.stats()).values()))

    def close(self) -> None:
        """Close the shards: their leased groups are requeued. The client stays open."""
        opened = [*self._shards.opened, *([self._turn] if self._turn is not None else [])]
        with Deadline(self._client.retry_s), ExitStack() as scope:
            for stream in opened:  # one that fails keeps no other open
                scope.callback(stream.close)

    # put

    def put(
        self,
        items: Items,
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> tuple[tuple[str, int], ...]:
        """Store experience, exactly once however often the request is repeated.

        It is put into the next shard that has room and can be reached. A put that may have reached
        a shard stays with that shard.

        Args:
            items: As for `ExperienceStream.put`.
            timeout: Seconds to wait for room in any shard with `on_full="block"`.
            options: Its policy_version, priority, status and tags.

        Returns:
            Task and id of each group that passed the filters, in order.

        Raises:
            StoreFull: No shard had room in time.
            StoreUnavailable: No shard could be reached; or one that may have stored the groups.
            As `ExperienceStream.put`. `stored` says how many groups, from the first, are stored.
        """
        return self._put(groups_of(items), PutOptions.checked(**options), timeout)

    def put_many(
        self,
        groups: Sequence[Sequence[BufferItem]],
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> tuple[tuple[str, int], ...]:
        """Store several groups, each visible as a whole, up to 32 to a shard.

        Arguments, result and errors are those of `put`.
        """
        return self._put(groups_of_many(groups), PutOptions.checked(**options), timeout)

    def _put(
        self, groups: Groups, options: PutOptions, timeout: float | None
    ) -> tuple[tuple[str, int], ...]:
        batch = self._any().prepared(groups, options)
        total, stored = len(batch.groups), list[tuple[str, int]]()
        try:
            with Deadline(timeout):
                for first in range(0, max(total, 1) if batch else 0, CHUNK_GROUPS):
                    self._put_piece(batch.part(first, min(first + CHUNK_GROUPS, total)), stored)
        except (StoreError, ConfigError) as error:
            error.stored = len(stored)
            raise
        return tuple(stored)

    def _any(self) -> Shard:
        return self._shards.opened[0]

    def _put_piece(self, piece: PutBatch, stored: list[tuple[str, int]]) -> None:
        """Store groups in the first shard in turn that takes them, or wait for room in any."""
        total, end = len(piece.groups), len(stored) + len(piece.groups)
        while True:
            refusal: StoreFull | None = None
            for number in self._shards.in_turn():
                patient = self._shards.all_away
                left = piece.part(total - (end - len(stored)), total)
                try:
                    with Deadline(repeat_s=None if patient else SHORT_OUTAGE_S):
                        pending = self._shards[number].new_put(left)
                    self._finish(number, pending, stored, timeout=None if patient else 0.0)
                    return
                except StoreFull as error:
                    refusal = error
                except StoreUnavailable as error:
                    self._shards.lose(number, error)
                    if error.uncertain or patient:
                        raise
            if refusal is not None:
                left = piece.part(total - (end - len(stored)), total)
                if self._await_room(left, stored, refusal):
                    return

    def _finish(
        self,
        number: int,
        pending: PendingPut,
        stored: list[tuple[str, int]],
        *,
        timeout: float | None,
    ) -> None:
        """Put groups into a shard, waiting for `timeout`, or longer if they may have arrived."""
        producer = self._shards[number].producer
        try:
            try:
                with Deadline(timeout):
                    producer.finish(pending)
            except (StoreFull, StoreUnavailable):
                if not pending.repeated or here().over:
                    raise
                producer.finish(pending)  # an attempt may still arrive: it stays with this shard
            self._shards.find(number)
        finally:
            producer.abandon(pending)
            stored += [(self._shards.names[number], seq) for seq in pending.ids]

    def _await_room(
        self, left: PutBatch, stored: list[tuple[str, int]], refusal: StoreFull
    ) -> bool:
        """Queue for room in all shards at once, and put into the first one that has some.

        Returns:
            Whether all groups are stored. Otherwise the shard had room for some of them, or for
            none after all, and the others are tried again.
        """
        if not self._blocks:
            raise refusal
        places: dict[int, PendingPut] = {}
        total = len(stored) + len(left.groups)
        try:
            while True:
                for number in self._shards.in_turn():
                    if self._granted(number, places, left):
                        with suppress(StoreFull):  # it had room for some, or the server has none
                            self._finish(number, places.pop(number), stored, timeout=0.0)
                        return len(stored) == total
                if here().over:
                    raise refusal
                shards = counted(len(self._shards), "shard")
                here().log(f"task {self.task!r} has no room in {shards}: a put waits")
                wait_for_any(
                    self._shards[number].wake(pending.identity.name)
                    for number, pending in places.items()
                )
        finally:
            for number, pending in places.items():
                producer = self._shards[number].producer
                with suppress(StoreError), Deadline(SHORT_OUTAGE_S):  # the place ends by itself
                    producer.ask_room(pending, ttl_ms=0).result()
                producer.abandon(pending)

    def _granted(self, number: int, places: dict[int, PendingPut], left: PutBatch) -> bool:
        """Queue in a shard, or keep the place; returns whether it has room for a group now."""
        try:
            with Deadline(repeat_s=SHORT_OUTAGE_S):
                shard = self._shards[number]
                pending = places.setdefault(number, shard.new_put(left))
                granted = shard.producer.ask_room(pending, ttl_ms=QUEUE_TTL_MS).result().granted
            self._shards.find(number)
        except StoreUnavailable as error:
            self._shards.lose(number, error)
            return False
        return granted > 0

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
        batch = _Batch(self._any().request(count, at_least, status, where))
        with Deadline(checked_timeout(timeout)), ExitStack() as scope:
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
        before, patient = batch.missing, self._shards.all_away
        for number in self._shards.in_turn():
            if not batch.missing:
                break
            least = min(share, batch.missing) or 1
            asked = TakeRequest(
                least if share else batch.missing, least, batch.request.status, batch.request.where
            )
            try:
                with Deadline(repeat_s=None if patient else SHORT_OUTAGE_S):
                    self._take_some(self._shards[number], number, batch, asked, ttl_ms)
                self._shards.find(number)
                patient = False
            except StoreUnavailable as error:
                self._shards.lose(number, error)
                if patient:
                    raise
        return batch.missing < before

    def _take_some(
        self, shard: Shard, number: int, batch: _Batch, asked: TakeRequest, ttl_ms: int
    ) -> None:
        """Lease groups of one shard, or queue there."""
        search = None
        batch.short.pop(number, None)
        while True:
            batch.queued[number] = asked.least
            reply, lease = shard.taker.take_once(
                asked, waiter=batch.waiter, search=search, ttl_ms=ttl_ms
            )
            if lease is not None:
                batch.leases.append(lease)
            batch.expired += reply.expired
            shard.taker.accept(asked, reply)
            if reply.outcome in ("gone", "more") and not here().pages_over:
                search = reply.search
                continue
            if reply.outcome == "short":
                batch.short[number] = reply
            if reply.outcome == "taken" or not ttl_ms:
                batch.queued.pop(number, None)
            return

    def _wait(self, batch: _Batch) -> None:
        """Collect groups as they come, in this take's turn, while there is time."""
        outage: StoreUnavailable | None = None  # of the node that keeps the turns
        gives_up = 0.0
        try:
            while batch.missing and not here().over:
                try:
                    with self._its_turn(batch):
                        outage = None
                        self._collect(batch)
                except BatchTimeout:
                    outage = None  # the turn did not come in time
                except StoreUnavailable as error:  # take what is there, and ask again
                    gives_up = gives_up if outage else time.monotonic() + self._client.retry_s
                    outage = error
                    if time.monotonic() >= gives_up:
                        break
                    self._sweep(batch)
                    if batch.missing:
                        batch.release()  # another take may need these groups
        finally:
            self._leave(batch)
        if batch.missing:
            self._sweep(batch)
        if outage is not None and batch.lacks:
            raise outage

    def _collect(self, batch: _Batch) -> None:
        """Collect groups as they come, while there is time."""
        while batch.missing and not here().over:
            # while no shard has its part of the missing groups, all have too few together
            if self._sweep(batch, -(-batch.missing // len(self._shards)), QUEUE_TTL_MS):
                continue
            here().log(
                f"task {self.task!r}: {batch.request.count - batch.missing} of "
                f"{counted(batch.request.count, 'group', 'are')} waiting in "
                f"{len(self._shards)} shards"
            )
            if batch.queued:
                shards = map(self._shards.__getitem__, batch.queued)
                wait_for_any(shard.wake(batch.waiter) for shard in shards)

    def _leave(self, batch: _Batch) -> None:
        """Leave the queues of all shards, so that others need not wait until the places expire."""
        extra = _Batch(batch.request)
        extra.waiter = batch.waiter
        for number, share in batch.queued.items():
            asked = TakeRequest(share, share, batch.request.status, batch.request.where)
            with suppress(StoreError), Deadline(SHORT_OUTAGE_S):  # the place ends by itself
                self._take_some(self._shards[number], number, extra, asked, 0)
        extra.release()  # groups that came in the meantime

    @contextmanager
    def _its_turn(self, batch: _Batch) -> Iterator[None]:
        """Hold the turn of this consumer group: a lease on the only group of a task of its own."""
        with Deadline(repeat_s=SHORT_OUTAGE_S):
            if self._turn is None:
                self._turn = ExperienceStream(
                    self._client,
                    f"{self.task}@turn",
                    namespace=self.namespace,
                    group=self.group,
                    on_full="error",
                    limit=1,
                    max_deliveries=1 << 30,
                    **self._lease_ms,
                )
            try:
                turn = self._turn.take(1, timeout=0)
            except BatchTimeout:
                with suppress(StoreFull):  # it is there: another take has it
                    self._turn.put([BufferItem(None, None)])
                batch.release()  # the take whose turn it is may need these groups
                turn = self._turn.take(1)
        try:
            yield
        finally:
            with suppress(LeaseLost, StoreError), Deadline(SHORT_OUTAGE_S):
                turn.release()

    def _timeout(self, batch: _Batch) -> BatchTimeout:
        """Return the error of a take whose time is up; it names the shards that are away."""
        replies = batch.short.values()
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
