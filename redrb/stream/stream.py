"""`ExperienceStream`, the object that users hold: every method on one page.

Each method checks its arguments and hands the work to the package that its section names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, Unpack

from redrb.checks import MOST, check_choice, checked_int, checked_number
from redrb.connection import Client, check_client
from redrb.connection.deadline import Deadline, checked_timeout
from redrb.connection.transport import Replication
from redrb.errors import ConfigError
from redrb.experience import BufferItem, Status
from redrb.experience.records import Scalar
from redrb.keys import check_name
from redrb.scopes import Closing
from redrb.stream.admission import Admission
from redrb.stream.admission.admitter import HOLD_S, MOST_RIGHTS, Admitter
from redrb.stream.arguments import AnyStatus, checked_least, checked_status
from redrb.stream.assembly.calls import MOST_PARTS, PART_AGE, GroupPart, OnIncomplete
from redrb.stream.assembly.collector import PartCollector
from redrb.stream.closing import close_ahead, close_at_end, takes_ahead, was_closed
from redrb.stream.open_task import OpenTask
from redrb.stream.options import LEASE_MS, StreamOptions
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.filters import Filter
from redrb.stream.put.options import PutOptions
from redrb.stream.put.preparer import Groups, Items, Preparer, groups_of, groups_of_many
from redrb.stream.put.producer import Producer
from redrb.stream.put.receiver import Receiver
from redrb.stream.put.refusals import DEFAULT_CHECKS, Check, OnBadGroup
from redrb.stream.put.rights import RightsSource
from redrb.stream.put.room import OnFull
from redrb.stream.put.writer import Writer
from redrb.stream.ranks.ranks import Balance, Ranks, checked_balance, checked_place
from redrb.stream.take.calls import TakeRequest
from redrb.stream.take.consumer import Consumer
from redrb.stream.take.forwarding import ForwardOptions
from redrb.stream.take.lease import Lease
from redrb.stream.take.loop import LeaseLoop
from redrb.stream.take.read_ahead import ReadAhead
from redrb.stream.take.rollout_reading import GroupReader
from redrb.stream.take.taker import Taker
from redrb.stream.task.origin import Origin, SourceGroup
from redrb.stream.task.queries import no_query
from redrb.stream.task.settings import (
    SettingArguments,
    TaskSettings,
    may_give_rights,
    settings_with,
)
from redrb.stream.task.store import TaskStore
from redrb.stream.task.task import Task
from redrb.stream.worker import Worker

_log = logging.getLogger("redrb")


class ExperienceStream(OpenTask, Closing):
    """The stream of one task: makers put groups of samples in, trainers take full batches out.

    A put is stored exactly once; a group is delivered at least once, until it is acknowledged. Any
    number of processes and threads may share a task, and threads may share one stream object.

    Examples:
        >>> stream = ExperienceStream(client, "math", limit=4096)
        >>> stream.put(items, policy_version=7)
        >>> with stream.take(32, timeout=30) as lease:
        ...     train(lease.batch())

    Attributes:
        task: Name of the task.
        namespace: Namespace of the task.
        group: Name of the consumer group.
        worker: What this object announces of itself to `redrb top` and others that look at the
            task: set `label`, `weight_version`, `metrics`.
    """

    _enter_name: Callable[[], None] | None = None

    def __init__(
        self,
        client: Client,
        task: str,
        *,
        namespace: str = "default",
        group: str = "default",
        on_full: OnFull = "block",
        lease_ms: int = LEASE_MS,
        weights: str | None = None,
        filters: Sequence[Filter] = (),
        min_replicas: int | None = None,
        checks: Collection[Check] = DEFAULT_CHECKS,
        on_bad_group: OnBadGroup = "raise",
        reader: GroupReader | None = None,
        settings: TaskSettings | None = None,
        create: bool = True,
        implied: TaskSettings | None = None,
        **task_settings: Unpack[SettingArguments],
    ) -> None:
        """Open a task, and create it when it is new.

        Args:
            client: The client that `redrb.connect` returned.
            task: Name of the task.
            namespace: Keeps experiments on one server apart.
            group: Consumer group of `take`; each consumer group gets every group of samples.
            on_full: Behaviour of `put` at the limit or at the server's memory limit: "block",
                "drop_oldest" or "drop_stalest" (evict groups that are not leased, by arrival or the
                lowest policy version first), or "error" (raise StoreFull).
            lease_ms: Silence of this object's heartbeat after which its leased groups are requeued
                for other consumers, and its rights to begin groups return to the task.
            weights: Name of the published weights whose newest version is the task's current one.
            filters: Functions that every group must pass to be put; others count as filtered.
            min_replicas: Replicas that must have received a put before it returns; default: that of
                the client.
            checks: Checks of each put: "values" (numbers are finite where `action_mask` counts
                them), "fields" (all completed groups of the task have the same fields and dtypes),
                "versions" (there is a policy version if the task has a bound of staleness, and with
                `weights` it is published). Default: all of them.
            on_bad_group: "raise" refuses a put with a bad group: nothing of it is stored, and the
                error names all bad groups. "drop" stores the other groups; bad ones are logged, and
                count as filtered.
            reader: Converts groups that a `ReplayBuffer` has put when they are taken, such as
                `redrb.compat.xtuner.RolloutReader()`. Default: taking one is a ConfigError.
            settings: Settings that the task must have.
            create: False: never create the task, neither now nor when it was deleted meanwhile. A
                call that needs the task raises UnknownTask then.
            implied: Settings that follow from something else, such as a batch size. They hold where
                no user gave others, and replace those that followed from something else before.
            task_settings: Fields of `TaskSettings`, such as `order="stalest"` or `limit=4096`; they
                replace those of `settings`.

        Raises:
            ConfigError: A name or a setting is not usable.
            TaskMismatch: The task exists with other settings.
            UnknownTask: The task does not exist, and `create` is False.
            StoreUnavailable: Redis stayed away.
        """
        check_client(client)
        options = StreamOptions(
            group=group,
            on_full=on_full,
            lease_ms=lease_ms,
            filters=filters,
            min_replicas=min_replicas,
            checks=checks,
            on_bad_group=on_bad_group,
            reader=reader,
        )
        asked = settings_with(settings, task_settings)
        opened = Task(
            client,
            TaskStore.of(client, namespace, task),
            namespace=namespace,
            settings=asked,
            implied=implied,
            weights=weights,
            create=create,
            enter_name=self._enter_name,
        )
        if on_full == "drop_stalest" and not opened.description.by_version:
            raise ConfigError(
                f'on_full="drop_stalest": task {task!r} indexes no policy versions: give it '
                'order="stalest" or max_staleness too, or use "drop_oldest".'
            )
        opened.is_advanced = implied is not None
        opened.log_unbounded(asked)
        super().__init__(opened, options.group)
        self.task, self.namespace, self.group = task, namespace, options.group
        self.worker = worker = Worker(opened, options.lease_ms)
        worker.weights_name = weights or ""
        client.workers.add(worker)

        def preparer(filters: Sequence[Filter], on_bad_group: OnBadGroup) -> Preparer:
            return Preparer(opened, filters, frozenset(options.checks), on_bad_group)

        prepare = preparer(options.filters, options.on_bad_group).prepare
        replicas = options.min_replicas
        replication = Replication(client.min_replicas if replicas is None else replicas)
        producer = Producer(opened, options.on_full, replication, options.on_bad_group, worker)
        self._prepare_groups, self._producer = prepare, producer
        self._receiver = Receiver(opened, producer, prepare)
        self._admitter = Admitter(opened, options.lease_ms, worker)
        whole = preparer((), "raise")
        self._parts = PartCollector(opened, whole, prepare, producer, replication)
        self._consumer = Consumer(
            opened,
            options.group,
            options.lease_ms,
            worker,
            options.reader,
            self._parts.finish_due,
            self._admitter.maker.end_dead,
        )
        worker.holds(self._consumer, self._admitter.maker)
        self._taker = Taker(opened, self._consumer)
        self._ranks = Ranks(opened, self._consumer, self._taker)
        close_at_end(self, ExperienceStream._close, client)

    def __repr__(self) -> str:
        where = self._store.client.where
        return f"<redrb.{type(self).__name__} {self.namespace}:{self.task} at {where}>"

    def __bool__(self) -> bool:
        """Return True, however many groups wait."""
        return True

    def __len__(self) -> int:
        """Return the number of groups that wait for this consumer group, in any status."""
        return self.stats().ledger.waiting

    # put/

    def put(
        self,
        items: Items,
        *,
        policy_version: int | None = None,
        priority: float | None = None,
        status: AnyStatus | None = None,
        tags: Mapping[str, Scalar | None] | None = None,
        admission: Admission | None = None,
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """Store experience, exactly once however often the request is repeated.

        Args:
            items: A list of samples is one group; one sample is a group by itself; each row of an
                Experience is a group. An empty list stores nothing.
            policy_version: Weight version that made the samples, where they hold none themselves.
            priority: Priority for the orders "priority" and "prioritized".
            status: Status of the groups; default: derived from their samples.
            tags: Values of declared tags, which replace those of the samples.
            admission: What `admit` returned: each group uses one right, lowest first, and groups
                that a filter or `on_bad_group="drop"` drops return theirs. A put that raises uses
                none for the groups that were not stored.
            timeout: Seconds to wait for room with `on_full="block"`; None waits for ever, and logs
                every half minute.

        Returns:
            Ids of the groups that passed the filters, in order.

        Raises:
            RecordError, EncodeError: The experience is malformed, or a check refuses it; nothing
                was stored. `bad_groups` has the indices of all bad groups.
            StoreFull: There was no room in time.
            StoreUnavailable: Redis stayed away; `uncertain` says whether the put may have landed.
            OutcomeUnknown: The connection broke, and more than an hour passed before Redis was
                reached again: the put may have landed, and is not repeated.
            ConfigError: `admission` has fewer rights than there are groups; nothing was stored.
        """
        options = PutOptions.checked(policy_version, priority, status, tags, admission)
        return self._put(groups_of(items), options, timeout)

    def put_many(
        self,
        groups: Sequence[Sequence[BufferItem]],
        *,
        policy_version: int | None = None,
        priority: float | None = None,
        status: AnyStatus | None = None,
        tags: Mapping[str, Scalar | None] | None = None,
        admission: Admission | None = None,
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """Store several groups with few round trips; each group becomes visible as a whole.

        Arguments, result and errors are those of `put`. When a put fails midway, the error's
        `stored` is the number of groups, from the first, that are stored;
        `StoreUnavailable.uncertain` is about the up to 32 groups after these. An empty group is an
        EncodeError.
        """
        options = PutOptions.checked(policy_version, priority, status, tags, admission)
        return self._put(groups_of_many(groups), options, timeout)

    def put_part(
        self,
        key: str,
        item: Items,
        *,
        index: int,
        of: int,
        least: int | None = None,
        part_age: str = PART_AGE,
        on_incomplete: OnIncomplete = "drop",
        most_parts: int = MOST_PARTS,
        policy_version: int | None = None,
        priority: float | None = None,
        tags: Mapping[str, Scalar | None] | None = None,
        admission: RightsSource | None = None,
        timeout: float | None = None,
    ) -> int | None:
        """Store one part of a group whose parts come from any number of processes.

        The call that brings the last part puts the group: it appears atomically and once, with its
        samples in the order of their indices. A part that is put twice counts once. See
        docs/how-to/groups-in-parts.md.

        Args:
            key: Names the group among those of the task; a group that is made again needs another
                key. A key is remembered for two hours after its group.
            item: A sample, or a list of samples.
            index: Place of the part in the group, 0 to `of - 1`.
            of: Parts of the group; the same for all of its parts, as `least` and `on_incomplete`.
            least: Fewest parts with which the group is put, as it is, at its age limit; default:
                all.
            part_age: Age limit of a group, from its first part on, such as "10m"; that of the first
                part holds.
            on_incomplete: What happens at the age limit to a group with fewer parts than `least`:
                "drop", or "dead": it becomes a dead letter.
            most_parts: Most groups of the task of which some parts wait.
            policy_version: Weight version that made the samples, where they hold none themselves.
            priority: Priority of the group; that of the last part that gives one holds.
            tags: Values of declared tags of the group: those of the first part that gives some.
            admission: What `admit` returned: the group keeps one right, however long its maker
                lives, and uses it when it appears. The right of a further part goes back.
            timeout: Seconds to wait for room for the whole group.

        Returns:
            Id of the group, for the last part and for each part that comes again or later; None
            while parts are missing, and for a group that was filtered or dropped.

        Raises:
            RecordError, EncodeError: The part is malformed, or a check refuses it.
            ConfigError: `of`, `least`, `on_incomplete` or the fields are not those of the earlier
                parts, or `admission` has no right left.
            StoreFull: As many groups as `most_parts` wait already, or there was no room for the
                whole group in time; then its parts are stored, and it is put later.
            StoreUnavailable: Redis stayed away; put the part again.
        """
        self._check_open()
        part = GroupPart.checked(key, index, of, least, part_age, on_incomplete, most_parts)
        options = PutOptions.checked(policy_version, priority, None, tags, admission)
        return self._parts.put(part, groups_of(item), options, timeout)

    def writer(self) -> Writer:
        """Return a writer, which sends each put while its caller makes the next one.

        `ExperienceSender` and the benchmarks put through one (`docs/reference/performance.md`).

        Examples:
            >>> with stream.writer() as writer:
            ...     for prompts in loader:
            ...         writer.put(make_experience(prompts), policy_version=7)
        """
        self._check_open()
        return Writer(self._producer, self._prepare)

    def admit(
        self,
        n: int = 1,
        *,
        least: int | None = None,
        timeout: float | None = None,
        hold_s: float = HOLD_S,
    ) -> Admission:
        """Wait for the right to begin groups that can be trained within `max_staleness`.

        At most `(max_staleness + 1) * groups_per_version` groups are begun and not yet trained, so
        that none comes too late. Waiting makers are served in the order of their arrival. The
        rights of a maker that dies return when its heartbeat stops for `lease_ms`. See
        docs/explanation/staleness-and-admission.md.

        Fetch the newest weights after this call, and before generating.

        Args:
            n: Groups.
            least: Fewest rights to accept; default `n`.
            timeout: Seconds to wait; 0 looks once; None waits for ever, and logs every half minute.
            hold_s: Seconds after which the task takes rights back that no put has used: for makers
                that hang. Groups that are put later are stored all the same.

        Returns:
            The rights, as a context manager; leaving it returns those that no put has used.

        Raises:
            AdmissionTimeout: There were too few in time; none was given.
            AdmissionRefused: The task has no `max_staleness`, or settings that exclude rights.
            ConfigError: The task never gives so many rights.
            StoreUnavailable: Redis stayed away.

        Examples:
            >>> with stream.admit(8) as right:
            ...     version = subscriber.poll(model)
            ...     stream.put_many(generate(prompts), admission=right)
        """
        self._check_open()
        count = checked_int("n", n, 1, MOST_RIGHTS)
        fewest = count if least is None else checked_int("least", least, 1, count)
        seconds = checked_number("hold_s", hold_s)
        if seconds <= 0:
            raise ConfigError(f"hold_s={hold_s!r}: give a number of seconds > 0.")
        with Deadline(timeout):
            return self._admitter.admit(count, fewest, seconds)

    @property
    def bounded(self) -> bool:
        """Whether the task has `max_staleness`, as this process last learned its settings."""
        return self._task.description.staleness.max_staleness is not None

    def discard_expired(self, groups: int) -> None:
        """Count groups that a maker found too stale to put, as put and expired, exactly once.

        Raises:
            StoreUnavailable: Redis stayed away; `uncertain` says whether they may be counted.
        """
        self._discard(expired=checked_int("groups", groups))

    def discard_filtered(self, groups: int) -> None:
        """Count groups that a maker filtered itself, as put and filtered, exactly once.

        Raises:
            StoreUnavailable: Redis stayed away; `uncertain` says whether they may be counted.
        """
        self._discard(filtered=checked_int("groups", groups))

    def _discard(self, *, expired: int = 0, filtered: int = 0) -> None:
        self._check_open()
        if expired or filtered:
            revision = self._task.description.revision  # a task that was deleted gets it back
            with Deadline():
                self._producer.put(PutBatch((), revision, expired=expired, filtered=filtered))

    def store_forwarded(
        self,
        groups: Sequence[list[BufferItem] | None],
        sources: Sequence[SourceGroup],
        origin: Origin,
        options: ForwardOptions,
    ) -> list[int | None]:
        """Store groups that a lease of another task forwards; use `lease.forward`."""
        self._check_open()
        put = PutOptions.checked(None, options.priority, options.status, options.tags)
        return self._receiver.receive(groups, sources, origin, put)

    def store_next(self, make: Callable[[int], list[BufferItem]], count: int) -> None:
        """Store the groups of the next numbers, from 1 on, each once; for the data sources.

        Other processes may store some of these numbers first: then fewer are stored, or none.
        """
        self._check_open()
        self._receiver.receive_next(make, count)

    # take/, ranks/

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

        Delivery is at least once: groups that are neither acknowledged nor released return to the
        queue when this consumer's heartbeat stops. Waiting takes are served in the order of their
        arrival.

        With `rank`, `world_size` and `step` all ranks take one batch together: rank 0 leases it,
        and each rank gets `count / world_size` groups of it, or the same error. Rank 0's `ack` ends
        the step for all ranks. See docs/how-to/several-ranks.md.

        Args:
            count: Groups in the batch, >= 1.
            timeout: Seconds to wait for a full batch; 0 looks once; None waits for ever, and logs
                every half minute.
            at_least: Fewest groups to accept when the time is up; default `count`.
            ack: The previous lease of this stream: acknowledged first, in the same round trip, even
                when the take itself times out.
            status: Status of the groups.
            where: Query that the groups' declared tags must match, such as `{"score_gt": 0.8}`; see
                docs/reference/selection.md. It looks at groups in the task's order until enough
                match, 1 to 3 microseconds each. It may take groups for which another take without a
                query waits.
            rank: Number of this process among the ranks, 0 to `world_size - 1`.
            world_size: Number of ranks; `count` must be a multiple of it.
            step: Number of the batch, the same on all ranks.
            balance: "tokens": all parts have about as many tokens; None: groups are dealt in turn.

        Returns:
            A lease; `lease.batch()` pads its samples to one batch.

        Raises:
            BatchTimeout: Too few groups came in time, or not all ranks; none was taken.
            LeaseLost: Another consumer holds groups of `ack` by now; nothing was taken.
            WrongStep: Rank 0 takes another step.
            ConfigError: `count` exceeds the task's limit, so the batch could never be full; ranks
                ask for different batches, or two processes are the same rank; or there is a query,
                and the task's order draws.
            StoreUnavailable: Redis stayed away.
        """
        request = self._take_request(count, at_least, status, where)
        if not (ack is None or isinstance(ack, Lease)):
            raise ConfigError(f"ack={ack!r:.80}: give the lease before this one.")
        if rank is None and world_size is None and step is None and balance is None:
            with Deadline(timeout), self.worker.steps.fetching():
                return self._taker.take(request, ack)
        seconds = checked_timeout(timeout)
        place = checked_place(request.count, rank, world_size, step)
        by = checked_balance(balance)
        if ack is not None:
            ack.ack()
        with self.worker.steps.fetching():
            return self._ranks.take(place, request, by, seconds)

    def leases(
        self,
        count: int,
        *,
        timeout: float | None = None,
        at_least: int | None = None,
        status: AnyStatus = Status.COMPLETED,
        where: Mapping[str, Any] | None = None,
        prefetch: int = 0,
    ) -> LeaseLoop:
        """Take batch after batch; each is acknowledged in the request that takes another one.

        It is the loop of the benchmarks (`docs/reference/performance.md`). `ExperienceLoader` also
        decodes and copies batches ahead.

        The loop acknowledges a lease when it asks for the next one, unless the lease has ended.
        After `break` or an exception a background thread releases the lease unharmed, at once: call
        `lease.ack()` before a `break`, or use `with lease:` to count failures. The loop holds up to
        `prefetch` + 1 batches. A loop that is kept in a variable holds them until it goes on, is
        closed, or the stream is closed: write `with stream.leases(32) as loop:` then. While Redis
        is away, the loop waits for it until the timeout.

        Args:
            count, timeout, at_least, status, where: Arguments of each take.
            prefetch: Most batches that a thread takes ahead, while their user trains. In a task
                with a bound of staleness each is checked again when the loop asks for it: if it has
                become too stale, it is returned, and another one comes. 0: no thread; each batch is
                taken when the loop asks for it.

        Raises:
            RedrbError: As `take`; with `prefetch`, LeaseLost may be about an earlier batch.

        Examples:
            >>> for lease in stream.leases(32, timeout=600):
            ...     train(lease.batch())
        """
        request = self._take_request(count, at_least, status, where)
        seconds, most = checked_timeout(timeout), checked_int("prefetch", prefetch)

        def begin() -> ReadAhead[None]:
            ahead = ReadAhead(
                lambda _, done: self._taker.take(request, done),
                self._taker.is_fresh,
                lambda _: None,
                prefetch=most,
                timeout=seconds,
                nudge=self._consumer.nudge,
            )
            takes_ahead(self, ahead)
            return ahead

        return LeaseLoop(begin, self._check_open, self.worker.steps)

    def is_fresh(self, lease: Lease, *, timeout: float | None = None) -> bool:
        """Look whether a batch that was taken some time ago is within the task's bounds yet.

        The bounds are `max_staleness` and `max_token_staleness`, counted from the newest version
        that the task knows in Redis. If one group is too stale, the lease is over: its groups are
        requeued, and those that are too stale expire. In a task without bounds no request is sent.

        Args:
            lease: A lease of this stream; parts of ranks are not checked.
            timeout: Seconds for which Redis may be away; None: the limit of the client.

        Returns:
            Whether the batch may be trained. If not, take another one.

        Raises:
            StoreUnavailable: Redis stayed away; the batch is still leased.
        """
        with Deadline(timeout):
            return self._taker.is_fresh(lease)

    @property
    def consumer(self) -> str:
        """Name under which this object holds leases; a forked process has another one."""
        return self._consumer.name

    def dismiss(self, consumer: str) -> int:
        """Requeue the groups that a dead consumer of this group leases, unharmed and at once.

        Without this call other consumers take them over when the dead consumer's heartbeat has been
        silent for its `lease_ms`.

        Args:
            consumer: The dead stream object's `consumer`.

        Returns:
            How many groups it held.

        Raises:
            StoreUnavailable: Redis stayed away.
        """
        self._check_open()
        return self._consumer.leave(check_name("consumer", consumer))

    def expect(self, groups: float) -> None:
        """Say how many groups trainers train for each weight version, at least.

        In a task with a bound of staleness this is the setting `groups_per_version`, by which it
        gives rights, unless a user gave another one. In other tasks nothing changes.

        Raises:
            StoreUnavailable: Redis could not be reached.
        """
        self.join_group()  # creates a task anew that was cleared
        stored = self.settings().values
        known = {name: stored[name] for name in stored.keys() & SettingArguments.__annotations__}
        if may_give_rights({**known, "groups_per_version": None}):
            self._task.expect(groups)

    def join_group(self, start: Literal["newest"] | None = None) -> None:
        """Register this consumer group now instead of at its first take.

        From then on no group of samples is deleted before this consumer group has acknowledged it.
        Joining a second time changes nothing.

        Args:
            start: None: see every group that is stored; "newest": only groups that are put from
                now on.
        """
        if start is not None:
            check_choice("start", start, ("newest",))
        self._check_open()
        self._consumer.attend()
        self._task.join(self.group, newest=start is not None)

    def close(self) -> None:
        """Stop the heartbeats, requeue leased groups, return rights; closing twice does no harm.

        The client stays open. This object puts and takes no more; `stats` and the other methods
        that look at the task go on working. While Redis is away all of it lasts as long as one
        request. The end of the process closes streams that are open; after an exception that nobody
        caught, leased groups then count a failed delivery when the lease is over.
        """
        self._close(True)

    def _close(self, requeue: bool) -> None:  # noqa: FBT001 (as `close_at_end` calls it)
        self._closed = True
        was_closed(self)
        consumer = partial(self._consumer.close, requeue=requeue)
        parts = (self.worker.close, self._admitter.maker.close, self._producer.close, consumer)
        with Deadline(self._store.client.retry_s), ExitStack() as scope:
            close_ahead(self, requeue=requeue)
            for close in parts:
                scope.callback(close)  # the last one first; one that fails keeps no other open

    def _put(self, groups: Groups, options: PutOptions, timeout: float | None) -> tuple[int, ...]:
        batch = self._prepare(groups, options)  # takes none of the time to wait for room
        batch.raise_refused()
        with Deadline(timeout):
            return self._producer.put(batch) if batch else ()

    def _prepare(self, groups: Groups, options: PutOptions) -> PutBatch:
        if self._closed:
            self._check_open()
        return self._prepare_groups(groups, options)

    def _take_request(
        self,
        count: int,
        at_least: int | None,
        status: AnyStatus,
        where: Mapping[str, Any] | None,
    ) -> TakeRequest:
        if self._closed:
            self._check_open()
        if (
            type(count) is int
            and 0 < count <= MOST
            and at_least is None is where
            and status is Status.COMPLETED
        ):
            return TakeRequest(count, count)
        most, least = checked_least(count, at_least)
        request = TakeRequest(most, least, checked_status(status), self._query(where))
        order = self._task.description.order
        if request.where and order is not None and order.sampled:
            raise no_query(self.task)
        return request
