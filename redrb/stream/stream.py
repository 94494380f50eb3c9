"""`ExperienceStream`: what users hold of a task."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, Self

from redrb.codec import decode_items, parse_group
from redrb.connection import Client
from redrb.errors import ConfigError, DecodeError, StoreError
from redrb.experience import BufferItem, Status
from redrb.experience.records import Scalar
from redrb.keys import TaskKeys, check_name
from redrb.orders import Order
from redrb.stream.ahead import leases
from redrb.stream.batch import Batch, Indexer
from redrb.stream.consumer import Consumer, Wanted
from redrb.stream.expiration import Expiration, Rules, StalenessReport
from redrb.stream.filters import Filter, check_filters
from redrb.stream.follower import Follower
from redrb.stream.history import StoredGroup, history, read_groups
from redrb.stream.intake import Given, Intake, Items, NarrowFloats
from redrb.stream.lease import Lease
from redrb.stream.ledger import StreamStats
from redrb.stream.producer import OnFull, Producer
from redrb.stream.rate import RateLimit
from redrb.stream.reprioritizing import Reprioritizer
from redrb.stream.saving import AnyPath, SavedTask, resume_task, save_task
from redrb.stream.settings import Eviction, OnExpired, TaskSettings
from redrb.stream.store import WIRE_FORMAT, TaskStore
from redrb.stream.where import parse_where
from redrb.stream.writer import Writer


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A group that is trained no more, and why.

    Attributes:
        id: Id that it had in the task.
        group: Consumer group that gave it up.
        reason: Why: what `reject` was told, or that deliveries failed.
        failed_deliveries: Leases of it that ended without acknowledgement.
        items: Its samples; None when they cannot be decoded.
    """

    id: int
    group: str
    reason: str
    failed_deliveries: int
    items: list[BufferItem] | None


class ExperienceStream:
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
        if not isinstance(client, Client):
            raise ConfigError(
                f"the client is a {type(client).__name__}: pass what redrb.connect(url) returns."
            )
        if on_full not in ("block", "drop_oldest", "error"):
            raise ConfigError(f'on_full={on_full!r}: use "block", "drop_oldest" or "error".')
        if lease_ms < 100:
            raise ConfigError(f"lease_ms={lease_ms}: a heartbeat needs at least 100 ms.")
        self.task = task
        self.namespace = namespace
        self.group = check_name("consumer group", group)
        self._narrow_floats = narrow_floats
        self._filters = check_filters(filters)
        self._settings = TaskSettings(
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
        self._asked = self._settings.as_stored()
        self._store = TaskStore(client, task, TaskKeys.of(namespace, task))
        self._open()
        self._follower = None if weights is None else Follower(self._store, namespace, weights)
        self._producer = Producer(self._store, on_full, self._open)
        self._consumer = Consumer(self._store, group, lease_ms, self._open)

    def __repr__(self) -> str:
        where = self._store.client.where
        return f"<redrb.ExperienceStream {self.namespace}:{self.task} at {where}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __bool__(self) -> bool:
        """Return True, however many groups wait."""
        return True

    def __len__(self) -> int:
        """Return the number of groups that wait for this consumer group, in whatever status."""
        return self.stats().ledger.waiting

    def put(
        self,
        items: Items,
        *,
        policy_version: int | None = None,
        priority: float | None = None,
        status: Status | None = None,
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
        given = Given(policy_version=policy_version, priority=priority, status=status, tags=tags)
        return self._put(self._intake.one(items, given), timeout)

    def put_many(
        self,
        groups: Sequence[Sequence[BufferItem]],
        *,
        policy_version: int | None = None,
        priority: float | None = None,
        status: Status | None = None,
        tags: Mapping[str, Scalar | None] | None = None,
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """Store several groups with few round trips; each group is visible whole or not at all.

        Args, returns and errors are those of `put`. Of a put that failed midway, the error's
        `stored` says how many of the groups, from the first, are in; `StoreUnavailable.uncertain`
        speaks of the up to 32 after these. An empty group is an EncodeError.
        """
        given = Given(policy_version=policy_version, priority=priority, status=status, tags=tags)
        return self._put(self._intake.many(groups, given), timeout)

    def writer(self) -> Writer:
        """Return a writer, for makers that put again and again.

        Each put is on its way while the next one is made, and as safe as `put`.

        Example:
            >>> with stream.writer() as writer:
            ...     for prompts in loader:
            ...         writer.put(make_experience(prompts), policy_version=7)
        """
        return Writer(self._producer, lambda items, given: self._intake.one(items, given))

    def take(
        self,
        count: int,
        *,
        timeout: float | None = None,
        at_least: int | None = None,
        ack: Lease | None = None,
        status: Status = Status.COMPLETED,
        where: Mapping[str, Any] | None = None,
    ) -> Lease:
        """Lease exactly `count` groups in this task's order, or none.

        Delivery is at least once: what is neither acknowledged nor released goes back when this
        consumer's heartbeat stops. Takes that wait are served in the order of their arrival.

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

        Returns:
            A lease; `lease.batch()` pads its samples to one batch.

        Raises:
            BatchTimeout: Fewer groups came in time; none was taken.
            LeaseLost: `ack` is another consumer's by now; nothing was taken.
            ConfigError: `count` exceeds the task's limit, so it could never be full.
            StoreUnavailable: Redis stayed away.
        """
        wanted = Wanted(count, _checked_least(count, at_least), _status(status), self._query(where))
        return self._consumer.take(wanted, timeout, ack)

    def leases(
        self,
        count: int,
        *,
        timeout: float | None = None,
        at_least: int | None = None,
        status: Status = Status.COMPLETED,
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
        wanted = Wanted(count, _checked_least(count, at_least), _status(status), self._query(where))
        return leases(self._consumer, wanted, timeout)

    def count(
        self, status: Status = Status.COMPLETED, where: Mapping[str, Any] | None = None
    ) -> int:
        """Return how many groups wait for this consumer group in a status; it joins the task.

        Raises:
            ConfigError: The query names a tag that the task does not declare.
        """
        return self._store.count(self.group, _status(status), self._query(where))

    def counts(self) -> dict[Status, int]:
        """Return how many groups wait in each status."""
        return {status: self.count(status) for status in Status}

    def move(self, ids: Iterable[int], status: Status) -> int:
        """Move waiting groups to another status, in one atomic step.

        Returns:
            How many of them wait there now; those that are leased or gone are left alone.
        """
        return self._store.move(self.group, _status(status), tuple(ids))

    def update_priority(self, ids: Sequence[int], priorities: Sequence[float]) -> int:
        """Change the priority of groups, waiting or leased, and with it their place in the order.

        Returns:
            How many of them are stored.

        Raises:
            ConfigError: The numbers of ids and priorities differ, or one is not usable.
        """
        return Reprioritizer(self._store, self._order).update(ids, priorities)

    def expire(
        self,
        current_version: int | None = None,
        *,
        max_staleness: int | None = None,
        max_token_staleness: int | None = None,
        statuses: Sequence[Status] = (Status.COMPLETED,),
        on_expired: OnExpired | Callable[[list[BufferItem]], object] | None = None,
    ) -> int:
        """Expire the waiting groups that are too stale; costs what expires, not what is stored.

        Args:
            current_version: Newest weight version; default: the one that the task knows.
            max_staleness, max_token_staleness: Rules; default: the task's own.
            statuses: Pools to look at.
            on_expired: "discard", "keep" (they wait with status EXPIRED), or a function that is
                told each group before it is discarded; default: the task's own setting.

        Returns:
            How many groups expired for this consumer group.

        Raises:
            ConfigError: No version or no rule is known, or the task does not index versions.
        """
        rules = Rules(max_staleness, max_token_staleness)
        return self._expiry.expire(
            current_version, rules, tuple(map(_status, statuses)), on_expired
        )

    def discard_expired(self, groups: int) -> None:
        """Count groups that a maker found too stale to put, as put and expired, exactly once.

        Raises:
            StoreUnavailable: Redis stayed away; `uncertain` says whether it may have landed.
        """
        if groups < 0:
            raise ConfigError(f"discard_expired({groups}): there are no fewer than none.")
        self._put(Batch((), expired=groups), None)

    def advance(self, version: int) -> int:
        """Tell the task the newest weight version; with `weights=` it learns it by itself.

        Returns:
            The version that the task knows now: it never goes back.
        """
        return self._store.advance(version)

    def staleness(self, current_version: int | None = None) -> StalenessReport:
        """Return how stale groups are that wait, that are leased, and that were taken.

        Raises:
            ConfigError: No current version is known, or the task does not index versions.
        """
        return self._expiry.report(current_version)

    def stats(self) -> StreamStats:
        """Return counters and ledger from one consistent look."""
        return StreamStats.of(self._store.stats(self.group))

    def read(self, ids: Sequence[int]) -> list[StoredGroup | None]:
        """Return groups by id without taking them, in the order of `ids`; None for those gone.

        Groups that were acknowledged are there as long as the task keeps them.
        """
        return read_groups(self._store, ids)

    def history(
        self, *, since: datetime | None = None, until: datetime | None = None
    ) -> Iterator[StoredGroup]:
        """Yield acknowledged groups that the task keeps, in the order of their acknowledgement.

        Args:
            since: Acknowledged then or later; times without a zone are local.
            until: Acknowledged before.
        """
        return history(self._store, since, until)

    def save(self, path: AnyPath) -> SavedTask:
        """Save the task, all its consumer groups included, to a file; see docs/saving.md.

        Others may go on meanwhile: what is stored from the beginning to the end is saved, once.
        Memory does not grow with the task.

        Raises:
            ConfigError: The file cannot be written.
            StoreUnavailable: Redis stayed away; an older file is as it was.
        """
        return save_task(self._store, path)

    def resume(self, path: AnyPath) -> SavedTask:
        """Fill this task, into which nothing was ever put, from a file.

        It is what it was, and what was leased waits. Settings that nobody has given are those of
        the file.

        Raises:
            ConfigError: The file cannot be read, or the task was used.
            TaskMismatch: The task has another order or other tags.
            DecodeError: The file is damaged, or of a newer format.
            All of them: nothing was changed.
            StoreUnavailable: Redis stayed away; so too, unless `uncertain` is set.
        """
        resumed = resume_task(self._store, path)
        self._open()
        return resumed

    def dead_letters(self, count: int = 100) -> list[DeadLetter]:
        """Return the newest `count` groups of the dead-letter stream, newest first."""
        return [_dead_letter(fields) for _, fields in self._store.dead_letters(count)]

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
        if isinstance(start, int) and self._store.indexer is None:
            raise ConfigError("only a task with keep= or keep_groups= can be read from an id on.")
        self._consumer.attend()
        told = "" if start is None else "+" if start == "newest" else str(start)
        if not self._store.join(self.group, told):
            self._open()
            self._store.join(self.group, told)

    def drop_group(self) -> int:
        """Remove this consumer group, with its leases and its ledger.

        Returns:
            Groups that were deleted because no other consumer group needs them.
        """
        return self._store.drop_group(self.group)

    def clear(self) -> int:
        """Delete the task: all its groups, leases, dead letters, ledger and settings.

        Whoever goes on using it starts an empty one, with the settings he gave.

        Returns:
            Groups that were stored.
        """
        return self._store.clear()

    def close(self) -> None:
        """Stop the heartbeat and give back what is still leased. The client stays open."""
        self._consumer.close()
        self._producer.close()

    def _put(self, batch: Batch, timeout: float | None) -> tuple[int, ...]:
        return self._producer.put(batch, timeout) if batch else ()

    def _query(self, where: Mapping[str, Any] | None) -> str:
        return "" if where is None else parse_where(where, self._intake.names)

    def _open(self) -> None:
        """Create the task where it is gone, and learn what it is."""
        stored = self._store.open({"format": str(WIRE_FORMAT), **self._asked})
        names = tuple(json.loads(stored["tags"] or "[]"))
        self._order = self._settings.chosen_order(stored["order"])
        self._store.indexer = Indexer(self._order, names) if stored["indexed"] else None
        self._intake = Intake(
            self._narrow_floats, self._filters, names, bool(stored["max_token_staleness"])
        )
        self._expiry = Expiration(self._store, self.group, stored)


def _status(status: Status | str) -> Status:
    try:
        return Status(status)
    except ValueError:
        known = ", ".join(Status)
        raise ConfigError(f"there is no status {status!r}: use one of {known}.") from None


def _checked_least(count: int, at_least: int | None) -> int:
    least = count if at_least is None else at_least
    if type(count) is not int or type(least) is not int or count < 1 or not 1 <= least <= count:
        raise ConfigError(f"take({count}, at_least={least}): 1 <= at_least <= count is needed.")
    return least


def _dead_letter(fields: dict[bytes, bytes]) -> DeadLetter:
    try:
        items = decode_items(parse_group(fields[b"g"])) if b"g" in fields else None
    except DecodeError:
        items = None
    try:
        return DeadLetter(
            id=int(fields[b"seq"]),
            group=fields[b"group"].decode(),
            reason=fields[b"reason"].decode(errors="replace"),
            failed_deliveries=int(fields[b"failed_deliveries"]),
            items=items,
        )
    except (KeyError, ValueError) as error:
        raise StoreError(
            f"the dead-letter stream holds an entry that is not ours: {error}"
        ) from error
