"""`ExperienceStream`: what users hold of a task."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, get_args

from redrb.checks import check_choice, checked_int, checked_timeout
from redrb.codec import NarrowFloats
from redrb.connection import Client
from redrb.errors import ConfigError
from redrb.experience import BufferItem, Status
from redrb.experience.records import Scalar
from redrb.keys import check_name
from redrb.orders import Order, ignores_priority
from redrb.stream.arguments import AnyStatus, checked_least, checked_status
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.filters import Filter, check_filters
from redrb.stream.put.items import Groups, Items, groups_of, groups_of_many
from redrb.stream.put.options import PutOptions
from redrb.stream.put.preparing import Preparer
from redrb.stream.put.producer import Producer
from redrb.stream.put.room import OnFull
from redrb.stream.put.writer import Writer
from redrb.stream.ranks.rank_requests import Balance, checked_balance, checked_place
from redrb.stream.ranks.ranks import Ranks
from redrb.stream.take.consumer import Consumer
from redrb.stream.take.in_flight import leases
from redrb.stream.take.lease import Lease
from redrb.stream.take.scripts import TakeRequest, TakeScripts
from redrb.stream.take.taker import Taker
from redrb.stream.task.follower import Follower
from redrb.stream.task.rate import RateLimit
from redrb.stream.task.settings import Eviction, OnExpired, TaskSettings
from redrb.stream.task.task import Task

_log = logging.getLogger("redrb")


class ExperienceStream(Task):
    """The stream of one task: makers put groups of samples in, trainers take full batches out.

    Put is exactly once; delivery is at least once, until acknowledged. Any number of processes and
    threads may share a task; one object may be shared by threads. Settings that belong to the task
    are remembered in Redis: who leaves one out takes what is there, who gives another one gets
    `TaskMismatch`.

    Example:
        >>> stream = ExperienceStream(client, "math", limit=4096)
        >>> stream.put(items, policy_version=7)
        >>> with stream.take(32, timeout=30) as lease:
        ...     train(lease.batch())
    """

    def __init__(
        self,
        client: Client,
        task: str,
        *,
        namespace: str = "default",
        group: str = "default",
        order: str | Order | None = None,
        limit: int | None = None,
        max_bytes: int | None = None,
        on_full: OnFull = "block",
        max_deliveries: int | None = None,
        lease_ms: int = 30_000,
        narrow_floats: NarrowFloats | None = None,
        max_staleness: int | None = None,
        max_token_staleness: int | None = None,
        on_expired: OnExpired | None = None,
        weights: str | None = None,
        max_reads: int | None = None,
        capacity: int | None = None,
        eviction: Eviction | None = None,
        rate: RateLimit | None = None,
        tags: Sequence[str] | None = None,
        filters: Sequence[Filter] = (),
        keep: str | None = None,
        keep_groups: int | None = None,
    ) -> None:
        """Open a task, and create it when it is new.

        A setting "of the task" is remembered in Redis; leave it out to take what is there.

        Args:
            client: What `redrb.connect` returned.
            task: Name of the task.
            namespace: Keeps experiments on one server apart.
            group: Consumer group of `take`: each group sees every entry.
            order: Which groups are taken first: "fifo" (default), "lifo", "stalest", "freshest",
                "priority", "uniform", "prioritized", or an `Order`; a setting of the task.
            limit: Most groups waiting and leased; a setting of the task, default 0: no limit.
            max_bytes: Most bytes waiting and leased; a setting of the task, default 0: no limit.
            on_full: What `put` does at the limit or at the server's memory limit: "block",
                "drop_oldest" (of those not leased; counted as evicted) or "error" (StoreFull).
            max_deliveries: Deliveries without acknowledgement (a consumer that died, or an
                exception in its block) after which a group goes to the dead-letter stream; a
                setting of the task, default 5.
            lease_ms: Silence of this consumer's heartbeat after which others take its leases over.
            narrow_floats: Store float32 and float64 as "float16" or "bfloat16": half the bytes,
                and not lossless.
            max_staleness: Most weight versions that a group's oldest token may be behind: what is
                staler expires at put, at take and by `expire`; a setting of the task.
            max_token_staleness: The same for the newest token that counts of each sample: one
                sample whose tokens are all too stale expires its group; a setting of the task.
            on_expired: "discard" (default), or "keep": expired groups wait with status EXPIRED; a
                setting of the task.
            weights: Name of the published weights whose newest version is the current one.
            max_reads: Times that a group is taken and acknowledged, 0 for ever; a setting of the
                task, default 1.
            capacity: Most groups stored; what exceeds it is evicted, never blocking; a setting of
                the task.
            eviction: Which go first at the capacity or by "drop_oldest": "oldest" (by arrival,
                default), "stalest" or "last" (in the task's order); a setting of the task.
            rate: How many reads an insert allows; a setting of the task.
            tags: Names of tags that queries may use; a setting of the task.
            filters: Each group must pass them to be put, else it counts as filtered.
            keep: Period such as "7d" for which acknowledged groups stay readable; a setting of the
                task.
            keep_groups: Most acknowledged groups that stay readable; a setting of the task.

        Raises:
            ConfigError: A bad name or setting.
            TaskMismatch: The task exists with other settings.
            StoreUnavailable: Redis stayed away.
        """
        check_choice("on_full", on_full, get_args(OnFull))
        if narrow_floats is not None:
            check_choice("narrow_floats", narrow_floats, get_args(NarrowFloats))
        checked_int("lease_ms", lease_ms, 100)
        self._narrow_floats = narrow_floats
        self._filters = check_filters(filters)
        self._closed = self._warned = False
        self._follower: Follower | None = None
        settings = TaskSettings(
            order=order,
            limit=limit,
            max_bytes=max_bytes,
            max_deliveries=max_deliveries,
            max_staleness=max_staleness,
            max_token_staleness=max_token_staleness,
            on_expired=on_expired,
            max_reads=max_reads,
            capacity=capacity,
            eviction=eviction,
            rate=rate,
            tags=tags,
            keep=keep,
            keep_groups=keep_groups,
        )
        super().__init__(client, task, namespace=namespace, group=group, settings=settings)
        if weights is not None:
            self._follower = Follower(self._store, namespace, weights)
        self._producer = Producer(self._store, on_full, self._open)
        self._consumer = Consumer(self._store, group, lease_ms)
        self._taker = Taker(self._store, self._consumer, self._open)
        self._ranks = Ranks(self._store, self._consumer, self._open)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def put(
        self,
        items: Items,
        *,
        policy_version: int | None = None,
        priority: float | None = None,
        status: AnyStatus | None = None,
        tags: Mapping[str, Scalar | None] | None = None,
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """Store experience, exactly once however often Redis has to be asked.

        Args:
            items: A list of samples is one group, one sample a group of its own, and an Experience
                one group a row. An empty list is nothing.
            policy_version: Weight version that made them, where they do not say it themselves.
            priority: For the orders "priority" and "prioritized".
            status: The groups' status; default: derived from their samples.
            tags: Values of declared tags, where those of the samples are not meant.
            timeout: Seconds to wait for room, with `on_full="block"`; None waits for ever, and
                logs every half minute what it waits for.

        Returns:
            Ids of the groups that passed the filters, in order.

        Raises:
            RecordError, EncodeError: The experience is malformed; nothing was stored.
            StoreFull: There was no room in time.
            StoreUnavailable: Redis stayed away; `uncertain` says whether it may have landed.
        """
        options = PutOptions.checked(policy_version, priority, status, tags)
        return self._put(groups_of(items), options, timeout)

    def put_many(
        self,
        groups: Sequence[Sequence[BufferItem]],
        *,
        policy_version: int | None = None,
        priority: float | None = None,
        status: AnyStatus | None = None,
        tags: Mapping[str, Scalar | None] | None = None,
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """Store several groups with few round trips; each group is visible whole or not at all.

        Args, returns and errors are those of `put`. Of a put that failed midway, the error's
        `stored` says how many of the groups, from the first, are in; `StoreUnavailable.uncertain`
        speaks of the up to 32 after these. An empty group is an EncodeError.
        """
        options = PutOptions.checked(policy_version, priority, status, tags)
        return self._put(groups_of_many(groups), options, timeout)

    def writer(self) -> Writer:
        """Return a writer, for makers that put again and again.

        Each put is on its way while the next one is made, and as safe as `put`.

        Example:
            >>> with stream.writer() as writer:
            ...     for prompts in loader:
            ...         writer.put(make_experience(prompts), policy_version=7)
        """
        self._check_open()
        return Writer(self._producer, self._prepare)

    def take(
        self,
        count: int,
        *,
        timeout: float | None = None,
        at_least: int | None = None,
        ack: Lease | None = None,
        status: AnyStatus = Status.COMPLETED,
        where: Mapping[str, Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        step: int | None = None,
        balance: Balance | None = None,
    ) -> Lease:
        """Lease exactly `count` groups in this task's order, or none.

        Delivery is at least once: what is neither acknowledged nor released goes back when this
        consumer's heartbeat stops. Takes that wait are served in the order of their arrival.

        With `rank`, `world_size` and `step` the batch is that of all ranks, formed once when all
        have asked for the step, and the lease is this rank's part: `count / world_size` groups, the
        same ones again until all ranks have acknowledged theirs. See docs/ranks.md.

        Args:
            count: Groups in the batch, >= 1.
            timeout: Seconds to wait for a full batch; 0 only looks; None waits for ever, and logs
                every half minute what is missing.
            at_least: Fewest groups that are welcome when the time is up, at the end of data;
                default `count`.
            ack: The lease before this one: it is acknowledged first, in the same round trip, also
                when the take itself times out.
            status: Status of the groups: each is a pool of its own.
            where: Only groups whose declared tags match this query, such as `{"score_gt": 0.8}`;
                see docs/queries.md. Groups that other takes wait for may be among them.
            rank: Which of the ranks this process is, 0 to `world_size - 1`.
            world_size: Ranks that take the same steps; `count` must be a multiple of it.
            step: Number of the batch; it counts up by one. A job that starts again gives the one
                of its checkpoint.
            balance: "tokens": parts have about as many tokens; None: they are dealt like cards.

        Returns:
            A lease; `lease.batch()` pads its samples to one batch.

        Raises:
            BatchTimeout: Fewer groups came in time, or not all ranks; none was taken.
            LeaseLost: `ack` is another consumer's by now; nothing was taken.
            RankLost: Another rank's heartbeat stopped; no rank got a part of this step.
            WrongStep: All ranks have acknowledged this step, or another one comes first.
            ConfigError: `count` exceeds the task's limit, so it could never be full; or ranks take
                from this consumer group, so nobody else may, or the other way round.
            StoreUnavailable: Redis stayed away.
        """
        request = self._take_request(count, at_least, status, where)
        if not (ack is None or isinstance(ack, Lease)):
            raise ConfigError(f"ack={ack!r:.80}: give the lease before this one.")
        if rank is None and world_size is None and step is None and balance is None:
            return self._taker.take(request, checked_timeout(timeout), ack)
        place = checked_place(request.count, rank, world_size, step)
        by = checked_balance(balance)
        if ack is not None:
            ack.ack()
        return self._ranks.take(place, request, by, checked_timeout(timeout))

    def leases(
        self,
        count: int,
        *,
        timeout: float | None = None,
        at_least: int | None = None,
        status: AnyStatus = Status.COMPLETED,
        where: Mapping[str, Any] | None = None,
    ) -> Generator[Lease]:
        """Take batch after batch, the next one on its way while this one is trained on.

        A lease is acknowledged when the loop comes back for the next, unless its user has ended it.
        What the loop did not come back for, after `break` or an exception, is released unharmed by
        the consumer's thread: call `lease.ack()` before a `break`, or use `with lease:` to count
        failures. It holds up to two batches at a time, so the next one may be a step staler than
        with `take`.

        Args:
            count, timeout, at_least, status, where: Of each take.

        Raises:
            As `take` does. LeaseLost may speak of the batch before the last one.

        Example:
            >>> for lease in stream.leases(32, timeout=600):
            ...     train(lease.batch())
        """
        request = self._take_request(count, at_least, status, where)
        loop = leases(self._taker, self._consumer, request, checked_timeout(timeout))
        return self._while_open(loop)

    def discard_expired(self, groups: int) -> None:
        """Count groups that a maker found too stale to put, as put and expired, exactly once.

        Raises:
            StoreUnavailable: Redis stayed away; `uncertain` says whether it may have landed.
        """
        self._check_open()
        expired = checked_int("groups", groups)
        if expired:
            self._producer.put(PutBatch((), expired=expired), None)

    @property
    def consumer(self) -> str:
        """Name under which this object holds leases; another one in a forked process."""
        return self._consumer.name

    def dismiss(self, consumer: str) -> int:
        """Give back, unharmed and at once, what a consumer of this group leases: it is dead.

        Others take its leases over by themselves when its heartbeat has been silent for its
        `lease_ms`; call this where it is known to be gone, such as the process before this one.

        Args:
            consumer: Its `consumer`.

        Returns:
            How many groups it held.

        Raises:
            StoreUnavailable: Redis stayed away.
        """
        self._check_open()
        return TakeScripts(self._store).leave(self.group, check_name("consumer", consumer))

    def settle(self, trained: Mapping[int, int]) -> int:
        """Acknowledge groups by id, wherever they are: for a run that resumes from a checkpoint.

        A run that acknowledges after its checkpoint may die between the two. What the checkpoint
        has trained then waits again, or is held by the dead run: it is done, and not taken again.

        Args:
            trained: Samples of each group that the checkpoint has trained, by the group's id.

        Returns:
            How many of them were not acknowledged yet.

        Raises:
            StoreUnavailable: Redis stayed away.
        """
        self._check_open()
        return self._scripts.settle(self.group, trained) if trained else 0

    def join_group(self, start: int | Literal["newest"] | None = None) -> None:
        """Register this consumer group now instead of at its first take.

        From then on nothing is deleted before this group is done with it. A group that is there
        already stays as it is.

        Args:
            start: None to see all that is stored and not done elsewhere, "newest" nothing of it, or
                an id: everything from that id on, kept history included.

        Raises:
            ConfigError: An id is given, and the task keeps no history.
        """
        if not (start in (None, "newest") or (type(start) is int and start >= 1)):
            raise ConfigError(f'start={start!r}: give an id, "newest" or None.')
        self._check_open()
        self._consumer.attend()
        told = "" if start is None else "+" if start == "newest" else str(start)
        if not self._scripts.join(self.group, told):
            self._open()
            self._scripts.join(self.group, told)

    def clear(self) -> int:
        """Delete the task: all its groups, leases, dead letters, ledger and settings.

        Whoever goes on using it starts an empty one, with the settings he gave. With `weights=` it
        begins again at once, knowing the newest version.

        Returns:
            Groups that were stored.
        """
        stored = super().clear()
        if self._follower is not None:
            self._open()
        return stored

    def close(self) -> None:
        """Stop the heartbeat and give back what is still leased; closing twice does no harm.

        The client stays open. From then on nothing is put or taken by this object; what looks at
        the task, such as `stats`, goes on working.
        """
        self._closed = True
        try:
            self._ranks.close()
        finally:
            self._consumer.close()
            self._producer.close()

    def _put(self, groups: Groups, options: PutOptions, timeout: float | None) -> tuple[int, ...]:
        batch = self._prepare(groups, options)
        return self._producer.put(batch, timeout) if batch else ()

    def _prepare(self, groups: Groups, options: PutOptions) -> PutBatch:
        """Check and encode the groups of a put."""
        self._check_open()
        if options.tags and not set(options.tags) <= set(self._tags):
            self._open()  # another process may have declared these tags since
        batch = self._preparer.prepare(groups, options)
        if options.priority is not None:
            self._warn_of_priorities()
        return batch

    def _take_request(
        self,
        count: int,
        at_least: int | None,
        status: AnyStatus,
        where: Mapping[str, Any] | None,
    ) -> TakeRequest:
        self._check_open()
        most, least = checked_least(count, at_least)
        return TakeRequest(most, least, checked_status(status), self._query(where))

    def _while_open(self, batches: Generator[Lease]) -> Generator[Lease]:
        try:
            while True:
                self._check_open()
                yield next(batches)
        finally:
            batches.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(
                f"this stream of task {self.task!r} is closed: open another ExperienceStream."
            )

    def _warn_of_priorities(self) -> None:
        """Warn, once, that the task's order does not look at priorities."""
        if self._warned or not ignores_priority(self._order):
            return
        self._warned = True
        _log.warning(
            "task %r: priorities are stored, but its order does not go by them: open it with "
            'order="priority" or "prioritized", or put without priority=',
            self.task,
        )

    def _learn(self, stored: Mapping[str, str]) -> None:
        super()._learn(stored)
        by_token = bool(stored["max_token_staleness"])
        self._preparer = Preparer(self._narrow_floats, self._filters, self._tags, by_token)
        if self._follower is not None:  # a task that was cleared does not know the version
            self._follower.follow()
