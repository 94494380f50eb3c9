"""`ExperienceStream`, the object that users hold: every method on one page.

Each method checks its arguments and hands the work to the package that its section names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from redrb.checks import (
    checked_int,
    checked_int_or_none,
    checked_number,
    checked_timeout,
)
from redrb.connection import Client, check_client
from redrb.connection.deadline import Deadline
from redrb.errors import ConfigError
from redrb.experience import BufferItem, Status
from redrb.experience.records import Scalar
from redrb.keys import TaskKeys, check_name
from redrb.stream.admission import Admission
from redrb.stream.admission.admitter import HOLD_S, MOST_RIGHTS, Admits, Admitter
from redrb.stream.arguments import (
    BEFORE_ANY,
    AnyStatus,
    checked_ids,
    checked_least,
    checked_letters,
    checked_status,
    checked_statuses,
)
from redrb.stream.closing import close_at_end, was_closed
from redrb.stream.options import StreamOptions
from redrb.stream.parts.collector import PartCollector
from redrb.stream.parts.part import MOST_PARTS, PART_AGE, OnIncomplete, Part
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.filters import Filter
from redrb.stream.put.in_flight import Puts
from redrb.stream.put.items import Groups, Items, groups_of, groups_of_many
from redrb.stream.put.options import PutOptions
from redrb.stream.put.preparer import Preparer
from redrb.stream.put.producer import Producer
from redrb.stream.put.receiver import Receiver
from redrb.stream.put.refusals import DEFAULT_CHECKS, Check, OnBadGroup
from redrb.stream.put.replication import Replication
from redrb.stream.put.room import OnFull
from redrb.stream.put.writer import Writer
from redrb.stream.ranks.rank_requests import Balance, checked_balance, checked_place
from redrb.stream.ranks.ranks import Ranks, RankTakes
from redrb.stream.saving.resuming import resume_task
from redrb.stream.saving.saving import AnyPath, SavedTask, save_task
from redrb.stream.take.calls import TakeRequest
from redrb.stream.take.consumer import Consumer
from redrb.stream.take.forwarding import ForwardOptions
from redrb.stream.take.in_flight import LeaseLoop, Takes
from redrb.stream.take.lease import Lease
from redrb.stream.take.reading import GroupReader
from redrb.stream.take.taker import Taker
from redrb.stream.task.configuring import check_changes
from redrb.stream.task.dead_letters import DeadLetter, dead_letters
from redrb.stream.task.description import StalenessRules, TaskDescription
from redrb.stream.task.expiration import Expiration, StalenessReport
from redrb.stream.task.group_changes import move, settle, update_priorities
from redrb.stream.task.history import StoredGroup, history, read_groups
from redrb.stream.task.inspection import count_waiting, stats_of
from redrb.stream.task.ledger import StreamStats
from redrb.stream.task.letter_changes import drop, requeue
from redrb.stream.task.origin import Origin, Source
from redrb.stream.task.queries import parse_where
from redrb.stream.task.settings import (
    LEASE_MS,
    OnExpired,
    SettingArguments,
    TaskSettings,
    may_give_rights,
    settings_with,
)
from redrb.stream.task.stored_settings import StoredSettings
from redrb.stream.task.task import Task
from redrb.stream.worker import Worker
from redrb.weights.wire.calls import Advance

_log = logging.getLogger("redrb")


class ExperienceStream:
    """The stream of one task: makers put groups of samples in, trainers take full batches out.

    A put is stored exactly once; a group is delivered at least once, until it is acknowledged. Any
    number of processes and threads may share a task, and threads may share one stream object.

    Example:
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

    worker: Worker

    def __new__(
        cls,
        *_args: Any,
        settings: TaskSettings | None = None,
        partitions: int | None = None,
        **_options: Any,
    ) -> Self:
        """Return a stream of the class for tasks with partitions, if it is to have some."""
        if cls is ExperienceStream:
            stored = settings.partitions if isinstance(settings, TaskSettings) else None
            if (partitions or stored or 1) != 1:
                from redrb.stream.partitions.stream import PartitionedStream

                return object.__new__(PartitionedStream)  # type: ignore[return-value]
        return object.__new__(cls)

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
                "drop_oldest" (evict groups that are not leased) or "error" (raise StoreFull).
            lease_ms: Silence of this object's heartbeat after which its leased groups are requeued
                for other consumers, and its rights to begin groups return to the task.
            weights: Name of the published weights whose newest version is the task's current one.
            filters: Functions that every group must pass to be put; others count as filtered.
            min_replicas: Replicas that must have received a put before it returns; default: that of
                the client.
            checks: Checks of each put: "values" (numbers are finite where `action_mask` counts
                them), "fields" (all completed groups of the task have the same fields and dtypes),
                "versions" (there is a policy version if the task has a bound of staleness).
                Default: all of them.
            on_bad_group: "raise" refuses a put with a bad group: nothing of it is stored, and the
                error names all bad groups. "drop" stores the other groups; bad ones are logged, and
                count as filtered.
            reader: Converts groups that a `ReplayBuffer` has put when they are taken, such as
                `redrb.replay.RolloutReader()`. Default: taking one is a ConfigError.
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
        self.task, self.namespace, self.group = task, namespace, options.group
        self._closed = False
        self._task = Task(
            client,
            task,
            namespace=namespace,
            settings=settings_with(settings, task_settings),
            implied=implied,
            weights=weights,
            keys=self._keys(namespace, task),
            create=create,
            like=self._description(),
        )
        self._open(client, options)

    def _open(self, client: Client, options: StreamOptions) -> None:
        """Make the objects that put and take."""
        task, on_bad_group = self._task, options.on_bad_group
        replicas = client.min_replicas if options.min_replicas is None else options.min_replicas
        replication = Replication(replicas)

        def preparer(filters: Sequence[Filter], on_bad: OnBadGroup) -> Preparer:
            return Preparer(task, filters, frozenset(options.checks), on_bad)

        self._expiration = Expiration(task, self.group)
        self._preparer = preparer(options.filters, on_bad_group)
        self.worker = Worker(task, options.lease_ms)
        self._producer: Puts = Producer(
            *(task, options.on_full, replication, on_bad_group, self.worker)
        )
        self._receiver = Receiver(task, self._producer, self._prepare)
        self._admitter: Admits = Admitter(task, options.lease_ms, self.worker)
        self._parts = PartCollector(
            task, preparer((), "raise"), self._preparer.prepare, self._producer, replication
        )
        self._consumer = Consumer(
            *(task, self.group, options.lease_ms, self.worker),
            *(options.reader, self._parts.finish_due),
        )
        self.worker.holds(self._consumer, self._admitter)
        self._taker: Takes = Taker(task, self._consumer)
        self._ranks: RankTakes = Ranks(task, self._consumer)
        close_at_end(self, ExperienceStream._close, client)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        where = self._task.store.client.where
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
        admission: Admission | None = None,
        timeout: float | None = None,
    ) -> int | None:
        """Store one part of a group whose parts come from any number of processes.

        The call that brings the last part puts the group: it appears atomically and once, with its
        samples in the order of their indices. A part that is put twice counts once. See
        docs/stream.md.

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
        part = Part.checked(key, index, of, least, part_age, on_incomplete, most_parts)
        options = PutOptions.checked(policy_version, priority, None, tags, admission)
        return self._parts.put(part, groups_of(item), options, timeout)

    def writer(self) -> Writer:
        """Return a writer, which sends each put while its caller makes the next one.

        `ExperienceSender` and the benchmarks put through one (`docs/performance.md`).

        Example:
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
        docs/staleness.md.

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

        Example:
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
        self._check_open()
        expired = checked_int("groups", groups)
        if expired:
            revision = self._task.description.revision
            with Deadline():
                self._producer.put(PutBatch((), revision, expired=expired))

    def discard_filtered(self, groups: int) -> None:
        """Count groups that a maker filtered itself, as put and filtered, exactly once.

        Raises:
            StoreUnavailable: Redis stayed away; `uncertain` says whether they may be counted.
        """
        self._check_open()
        filtered = checked_int("groups", groups)
        if filtered:
            revision = self._task.description.revision
            with Deadline():
                self._producer.put(PutBatch((), revision, filtered=filtered))

    def store_forwarded(
        self,
        groups: Sequence[list[BufferItem] | None],
        sources: Sequence[Source],
        origin: Origin,
        options: ForwardOptions,
    ) -> list[int | None]:
        """Store groups that a lease of another task forwards; use `lease.forward`."""
        self._check_open()
        put = PutOptions.checked(None, options.priority, options.status, options.tags)
        return self._receiver.receive(groups, sources, origin, put)

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

        With `rank`, `world_size` and `step` all ranks take one batch together. It is formed once,
        when every rank has asked for the step; the lease holds this rank's `count / world_size`
        groups, the same ones again until all ranks have acknowledged theirs. See docs/ranks.md.

        Args:
            count: Groups in the batch, >= 1.
            timeout: Seconds to wait for a full batch; 0 looks once; None waits for ever, and logs
                every half minute.
            at_least: Fewest groups to accept when the time is up; default `count`.
            ack: The previous lease of this stream: acknowledged first, in the same round trip, even
                when the take itself times out.
            status: Status of the groups.
            where: Query that the groups' declared tags must match, such as `{"score_gt": 0.8}`; see
                docs/queries.md. It may take groups for which another take without a query waits.
            rank: Number of this process among the ranks, 0 to `world_size - 1`.
            world_size: Number of ranks; `count` must be a multiple of it.
            step: Number of the batch, which counts up by one; a job that starts again continues at
                the step of its checkpoint.
            balance: "tokens": all parts have about as many tokens; None: groups are dealt in turn.

        Returns:
            A lease; `lease.batch()` pads its samples to one batch.

        Raises:
            BatchTimeout: Too few groups came in time, or not all ranks; none was taken.
            LeaseLost: Another consumer holds groups of `ack` by now; nothing was taken.
            RankLost: Another rank's heartbeat stopped; no rank got a part of this step.
            WrongStep: All ranks have acknowledged this step, or another one comes first.
            ConfigError: `count` exceeds the task's limit, so the batch could never be full; or
                takes with and without ranks meet in one consumer group.
            StoreUnavailable: Redis stayed away.
        """
        request = self._take_request(count, at_least, status, where)
        if not (ack is None or isinstance(ack, Lease)):
            raise ConfigError(f"ack={ack!r:.80}: give the lease before this one.")
        seconds = checked_timeout(timeout)
        if rank is None and world_size is None and step is None and balance is None:
            with Deadline(seconds), self.worker.steps.fetching():
                return self._taker.take(request, ack)
        place = checked_place(request.count, rank, world_size, step)
        by = checked_balance(balance)
        if ack is not None:
            ack.ack()
        with Deadline(seconds), self.worker.steps.fetching():
            return self._ranks.take(place, request, by)

    def leases(
        self,
        count: int,
        *,
        timeout: float | None = None,
        at_least: int | None = None,
        status: AnyStatus = Status.COMPLETED,
        where: Mapping[str, Any] | None = None,
    ) -> LeaseLoop:
        """Take batch after batch; the next one is prefetched while its user trains on this one.

        It is the loop of the benchmarks (`docs/performance.md`), and has no thread;
        `ExperienceLoader` also decodes and copies ahead.

        The loop acknowledges a lease when it asks for the next one, unless the lease has ended.
        After `break` or an exception a background thread releases the lease unharmed, at once: call
        `lease.ack()` before a `break`, or use `with lease:` to count failures. The loop holds up to
        two batches. A loop that is kept in a variable holds them until it goes on, is closed, or
        the stream is closed: write `with stream.leases(32) as loop:` then. In a task with a bound
        of staleness the prefetched batch is checked again when the loop asks for it: if it has
        become too stale, it is returned, and another one comes.

        Args:
            count, timeout, at_least, status, where: Arguments of each take.

        Raises:
            As `take`; LeaseLost may be about the batch before the last one.

        Example:
            >>> for lease in stream.leases(32, timeout=600):
            ...     train(lease.batch())
        """
        request = self._take_request(count, at_least, status, where)
        return LeaseLoop(
            *(self._taker, request, checked_timeout(timeout)),
            *(self._check_open, self.worker.steps),
        )

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

    @property
    def incarnation(self) -> str:
        """Random name that the task got when it was created.

        After Redis lost its data, or the task was cleared, it is created anew with another name,
        and its ids begin anew: an id names a group only together with the incarnation.
        """
        return self._task.description.incarnation

    def settle(self, trained: Mapping[int, int], *, incarnation: str) -> int:
        """Acknowledge groups by id, leased or waiting, when a run resumes from a checkpoint.

        A run may die between its checkpoint and its acknowledgements. The groups that the
        checkpoint has trained then wait again, or are leased by the dead run; this call prevents
        that they are taken a second time.

        Groups whose ids may be those of other groups by now are not acknowledged, and a warning
        says how many: all of them when the task was created anew since, and those that were put
        after the save when it was restored from a file.

        Args:
            trained: Samples of each group that the checkpoint has trained, by the group's id.
            incarnation: `lease.incarnation` of the lease on these groups.

        Returns:
            How many of them were not acknowledged yet.

        Raises:
            StoreUnavailable: Redis stayed away.
        """
        self._check_open()
        if not isinstance(incarnation, str):
            raise ConfigError(f"incarnation={incarnation!r:.80}: give lease.incarnation.")
        settled = settle(self._task.store, self.group, trained, incarnation)
        if settled.refused:
            _log.warning(
                "task %r: %d groups that a checkpoint has trained are not acknowledged, because "
                "the task was created anew since: their ids may be those of other groups now",
                self.task,
                settled.refused,
            )
        return settled.acknowledged

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

    def join_group(self, start: int | Literal["newest"] | None = None) -> None:
        """Register this consumer group now instead of at its first take.

        From then on no group of samples is deleted before this consumer group has acknowledged it.
        Joining a second time changes nothing.

        Args:
            start: None: see every group that is stored and not acknowledged elsewhere; "newest":
                only groups that are put from now on; an id: everything from that id on, kept
                history included.

        Raises:
            ConfigError: An id is given, and the task keeps no history.
        """
        first = "" if start is None else "+"
        if not (start is None or start == "newest"):
            first = str(checked_int("start", start, 1))
        self._check_open()
        self._consumer.attend()
        self._task.join(self.group, first)

    # task/

    def count(
        self, status: AnyStatus = Status.COMPLETED, where: Mapping[str, Any] | None = None
    ) -> int:
        """Return how many groups wait for this consumer group in a status; changes nothing.

        For a consumer group that has not joined these are all stored groups of that status.

        Raises:
            ConfigError: The query names a tag that the task does not declare.
        """
        checked, query = checked_status(status), self._query(where)
        return count_waiting(self._task.store, self.group, checked, query)

    def counts(self) -> dict[Status, int]:
        """Return how many groups wait in each status."""
        return {status: self.count(status) for status in Status}

    def stats(self) -> StreamStats:
        """Return ledger and counters, all from one moment."""
        return stats_of(self._task.store, self.group)

    def staleness(self, current_version: int | None = None) -> StalenessReport:
        """Return how stale the waiting, the leased and the taken groups are.

        Args:
            current_version: Newest weight version; default: the one that the task knows.

        Raises:
            ConfigError: No current version is known, or the task does not index versions.
        """
        version = checked_int_or_none("current_version", current_version, BEFORE_ANY)
        return self._expiration.report(version)

    def read(self, ids: Sequence[int]) -> list[StoredGroup | None]:
        """Return groups by id without taking them, in the order of `ids`; None for a deleted one.

        Acknowledged groups are found as long as the task keeps them.
        """
        return read_groups(self._task, checked_ids(ids))

    def history(
        self, *, since: datetime | None = None, until: datetime | None = None
    ) -> Iterator[StoredGroup]:
        """Yield the acknowledged groups that the task keeps, in the order of acknowledgement.

        Args:
            since: Earliest time of acknowledgement; times without a zone are local.
            until: Time before which groups were acknowledged.
        """
        for name, time in (("since", since), ("until", until)):
            if not (time is None or isinstance(time, datetime)):
                raise ConfigError(f"{name}={time!r:.80}: give a datetime.datetime.")
        return history(self._task, since, until)

    def dead_letters(self, count: int = 100) -> list[DeadLetter]:
        """Return the newest `count` groups of the dead-letter stream, newest first."""
        return dead_letters(self._task.store, checked_int("count", count))

    def requeue(self, ids: Iterable[int]) -> int:
        """Let dead letters of this consumer group wait again, each in its old place in the order.

        A letter is requeued once, however many callers ask. Its failed deliveries begin at 0, and
        its reads go on where they were. It waits although the task is at its limit: puts wait until
        there is room. In the ledger it is waiting instead of dead. If no other consumer group
        needs the group, it has left the stream, and gets a new id; groups that compare equal in the
        order, such as those of one priority, sort by that id. A group that is too stale expires, as
        any other.

        Args:
            ids: Ids that the groups had, as `dead_letters` returns them; those of earlier
                incarnations, from which the task was restored, are ids of the same groups.

        Returns:
            How many letters this call has requeued. Ids without a letter of this consumer group,
            and letters without a payload, are left out.

        Raises:
            ConfigError: The task has another order since a letter was given up, and Redis cannot
                compute the scores of this order, as those of an `Order` object.
        """
        return requeue(self._task.store, self.group, checked_letters(ids))

    def drop_dead_letters(self, ids: Iterable[int]) -> int:
        """Delete dead letters of this consumer group for good; they still count as dead.

        Returns:
            How many letters this call has deleted.
        """
        return drop(self._task.store, self.group, checked_letters(ids))

    def settings(self) -> StoredSettings:
        """Return the settings that the task has now, and who changed which when.

        Raises:
            UnknownTask: There is no such task, because it was cleared.
        """
        return self._task.stored_settings()

    def configure(self, **changes: Unpack[SettingArguments]) -> StoredSettings:
        """Change settings of the task, in one atomic step, while others work on it.

        All processes go by the new settings from their next call on. The settings that the task is
        to have are checked together, as when it is opened. None removes a setting. Every setting
        but `partitions` and `max_reads` can change; docs/stream.md says what becomes of the groups
        that are stored.

        Args:
            changes: Fields of `TaskSettings`, such as `limit=8192` or `max_staleness=None`.

        Returns:
            The settings that the task has then.

        Raises:
            ConfigError: A setting cannot change or have this value; nothing was changed.
            StoreUnavailable: Redis stayed away; the settings may have been changed.
        """
        self._check_open()
        check_changes(changes)
        self._configure(changes)
        return self.settings()

    def advance(self, version: int) -> int:
        """Give the task the newest weight version; not needed with `weights=`.

        Returns:
            The version that the task knows now, which never goes back.
        """
        return self._task.store.call(Advance(checked_int("version", version)))

    def move(self, ids: Iterable[int], status: AnyStatus) -> int:
        """Move waiting groups to another status, each in one atomic step.

        Returns:
            How many of them wait in that status now; leased and deleted groups are left alone.
        """
        return move(self._task.store, self.group, checked_status(status), checked_ids(ids))

    def update_priority(self, ids: Sequence[int], priorities: Sequence[float]) -> int:
        """Change the priority of groups, waiting or leased, and with it their place in the order.

        Returns:
            How many of them are stored.

        Raises:
            ConfigError: There is not one priority for each id, or a priority is not usable.
        """
        if isinstance(priorities, str | bytes | Mapping) or not isinstance(priorities, Iterable):
            raise ConfigError(f"priorities={priorities!r:.80}: give one number an id, in a list.")
        numbers = [checked_number("priority", priority) for priority in priorities]
        return update_priorities(self._task, checked_ids(ids), numbers)

    def expire(
        self,
        current_version: int | None = None,
        *,
        max_staleness: int | None = None,
        max_token_staleness: int | None = None,
        statuses: Sequence[AnyStatus] = (Status.COMPLETED,),
        on_expired: OnExpired | Callable[[list[BufferItem]], object] | None = None,
    ) -> int:
        """Expire the waiting groups that are too stale; its cost depends only on their number.

        Args:
            current_version: Newest weight version; default: the one that the task knows.
            max_staleness, max_token_staleness: Rules; default: those of the task.
            statuses: Statuses of the groups.
            on_expired: "discard", "keep" (they wait with status EXPIRED), or a function that is
                called with each group's samples before the group is discarded; default: the
                setting of the task.

        Returns:
            How many groups expired for this consumer group.

        Raises:
            ConfigError: No version or no rule is known, or the task does not index versions.
        """
        version = checked_int_or_none("current_version", current_version, BEFORE_ANY)
        rules = StalenessRules(
            checked_int_or_none("max_staleness", max_staleness),
            checked_int_or_none("max_token_staleness", max_token_staleness),
        )
        return self._expiration.expire(version, rules, checked_statuses(statuses), on_expired)

    # saving/

    def save(self, path: AnyPath) -> SavedTask:
        """Save the task, with all its consumer groups, to a file; see docs/saving.md.

        Other processes may go on meanwhile: every group that is stored from the beginning to the
        end is saved, once. Memory does not grow with the task.

        Raises:
            ConfigError: The file cannot be written.
            StoreUnavailable: Redis stayed away; an older file is unchanged.
        """
        return save_task(self._task.store, path)

    def resume(self, path: AnyPath) -> SavedTask:
        """Fill this task, into which nothing was ever put, from a file.

        Leased groups wait again. Settings that this task was not given are those of the file.

        Raises:
            ConfigError: The file cannot be read, or the task was used.
            TaskMismatch: The task has another order or other tags.
            DecodeError: The file is damaged, or of a newer format.
            StoreUnavailable: Redis stayed away.
            After each of them the task is unchanged, unless `StoreUnavailable.uncertain` is set.
        """
        resumed = resume_task(self._task.store, path)
        self._task.reopen()
        return resumed

    # the end

    def drop_group(self) -> int:
        """Remove this consumer group, with its leases and its ledger.

        Returns:
            Groups that were deleted because no other consumer group needs them.
        """
        return self._task.drop_group(self.group)

    def clear(self) -> int:
        """Delete the task, in one atomic step: groups, leases, dead letters, ledger and settings.

        Puts and takes that wait notice at once, or within a second if there are many.

        A stream object that goes on using it creates an empty task with the settings that the
        object was given; with `weights=` this one does so at once, to keep learning versions.

        Returns:
            Groups that were stored.
        """
        return self._task.clear()

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
        parts = (self.worker.close, self._admitter.close, self._producer.close, consumer)
        with Deadline(self._task.store.client.retry_s), ExitStack() as scope:
            for close in (*parts, self._ranks.close) if requeue else parts:
                scope.callback(close)  # the last one first; one that fails keeps no other open

    def _configure(self, changes: Mapping[str, Any]) -> None:
        self._task.configure(changes)

    def _keys(self, namespace: str, task: str) -> TaskKeys:
        return TaskKeys.of(namespace, task)

    def _description(self) -> TaskDescription | None:
        """Return a description to begin with, where the task cannot be opened yet."""
        return None

    def _put(self, groups: Groups, options: PutOptions, timeout: float | None) -> tuple[int, ...]:
        batch = self._prepare(groups, options)  # takes none of the time to wait for room
        batch.raise_refused()
        with Deadline(timeout):
            return self._producer.put(batch) if batch else ()

    def _prepare(self, groups: Groups, options: PutOptions) -> PutBatch:
        """Check and encode the groups of a put."""
        self._check_open()
        return self._preparer.prepare(groups, options)

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

    def _query(self, where: Mapping[str, Any] | None) -> str:
        if where is None:
            return ""
        try:
            return parse_where(where, self._task.description.tags)
        except ConfigError:
            self._task.reopen()  # another process may have declared its tags since
            return parse_where(where, self._task.description.tags)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(
                f"this stream of task {self.task!r} is closed: open another ExperienceStream."
            )
