"""`PartitionedStream`: the stream of a task that is spread over several partitions."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import datetime
from typing import Any, Literal, TypeVar
from zlib import crc32

from redrb.connection import Client, check_client
from redrb.connection.deadline import Deadline
from redrb.errors import AdmissionRefused, ConfigError
from redrb.experience import BufferItem, Status
from redrb.stream.admission import Admission
from redrb.stream.arguments import AnyStatus, checked_ids, checked_letters
from redrb.stream.options import StreamOptions
from redrb.stream.partitions.collector import Collector
from redrb.stream.partitions.partition import Partition
from redrb.stream.partitions.producer import PartitionedProducer
from redrb.stream.partitions.ranks import PartitionedRanks
from redrb.stream.partitions.settings import divided, summed_settings
from redrb.stream.put.items import Items
from redrb.stream.saving.partitions import resume_partitions, save_partitions
from redrb.stream.saving.saving import AnyPath, SavedTask
from redrb.stream.stream import ExperienceStream
from redrb.stream.take.calls import TakeRequest
from redrb.stream.take.forwarding import ForwardOptions
from redrb.stream.task.dead_letters import DeadLetter
from redrb.stream.task.expiration import Staleness, StalenessReport
from redrb.stream.task.history import StoredGroup
from redrb.stream.task.ledger import StreamStats
from redrb.stream.task.numbering import Numbering
from redrb.stream.task.origin import Origin, Source
from redrb.stream.task.reach import Reach
from redrb.stream.task.settings import (
    OnExpired,
    TaskSettings,
    settings_with,
)
from redrb.stream.task.store import TaskStore
from redrb.stream.task.stored_settings import StoredSettings


def summed_reports(parts: Sequence[StalenessReport]) -> StalenessReport:
    """Return the sum of the partitions' histograms of staleness."""
    names = [field.name for field in fields(StalenessReport) if field.name != "current_version"]
    version = max(part.current_version for part in parts)
    return StalenessReport(
        version, *(_histogram(getattr(part, name) for part in parts) for name in names)
    )


def _histogram(parts: Iterable[Staleness]) -> Staleness:
    groups: Counter[int] = Counter()
    for part in parts:
        groups.update(part.histogram)
    return Staleness(dict(groups))


MOST_PARTITIONS = 1024

T = TypeVar("T")

_OPTIONS = ("weights", "create", *(option.name for option in fields(StreamOptions)))
"""Arguments of a stream that are no settings of its task."""


class NoAdmission:
    """Refuses to give rights: they are counted in one task of one node."""

    def __init__(self, task: str) -> None:
        self._task = task

    def admit(self, *_request: object) -> Admission:
        """Raise AdmissionRefused."""
        raise AdmissionRefused(
            f"task {self._task!r} has partitions, and gives no rights to begin groups, since its "
            "groups are counted on different nodes: use a task without partitions."
        )

    @property
    def held(self) -> int:
        """No right is held."""
        return 0

    def close(self) -> None:
        """Do nothing."""


class PartitionedStream(ExperienceStream):
    """`ExperienceStream(..., partitions=n)`; docs/scaling.md says what it keeps and what not.

    Each method has the arguments, result and errors of the same method of `ExperienceStream`.
    """

    def __init__(
        self,
        client: Client,
        task: str,
        *,
        namespace: str = "default",
        settings: TaskSettings | None = None,
        implied: TaskSettings | None = None,
        **arguments: Any,
    ) -> None:
        """Open all partitions; new ones are created, unless `create` is False.

        Partitions that cannot be reached are opened when they are used and can be reached again.
        """
        check_client(client)
        options = {name: arguments.pop(name) for name in _OPTIONS if name in arguments}
        whole = settings_with(settings, arguments)
        whole.as_stored()
        follows = replace(implied or TaskSettings(), partitions=whole.partitions)
        count = whole.partitions or 1
        if count > MOST_PARTITIONS:
            raise ConfigError(f"partitions={count}: give at most {MOST_PARTITIONS}.")
        self.task, self.namespace = task, namespace
        self._closed = False
        self._reach = Reach(TaskStore.of_partitions(client, namespace, task, count))

        def opened(number: int, like: Partition | None = None) -> Partition:
            place = (client, task, number, whole, follows)
            return Partition(*place, namespace=namespace, like=like, **options)

        found = self._reach.ask(opened)
        like = next(iter(found.values()))
        self._partitions = [found.get(each) or opened(each, like) for each in range(count)]
        home = self._partitions[0]
        self.group = home.group
        self.worker = home.worker
        for partition in self._partitions[1:]:
            partition.worker.is_part_of(home.worker)
        self._numbering = Numbering(count)
        self._task = home.opened
        self._preparer = home.preparer
        self._producer = PartitionedProducer(
            *(task, self._partitions, options.get("on_full", "block"), self._reach)
        )
        self._admitter = NoAdmission(task)
        self._collector = self._taker = Collector(self._partitions, task, self._reach)
        self._ranks = PartitionedRanks(self._partitions, lambda: self.incarnation)

    # put

    def put_part(self, key: str, item: Items, **options: Any) -> int | None:
        """Store one part of a group; its key decides on the partition."""
        if not isinstance(key, str):
            raise ConfigError(f"key={key!r:.80}: give a text.")
        number = crc32(key.encode(errors="replace")) % len(self._partitions)
        group = self._partitions[number].put_part(key, item, **options)
        return None if group is None else self._id(number, group)

    def store_forwarded(
        self,
        groups: Sequence[list[BufferItem] | None],
        sources: Sequence[Source],
        origin: Origin,
        options: ForwardOptions,
    ) -> list[int | None]:
        """Store forwarded groups: the same source always in the same partition."""
        self._check_open()
        places: dict[int, list[int]] = {}
        for place, source in enumerate(sources):
            places.setdefault(source.seq % len(self._partitions), []).append(place)

        def store(number: int) -> list[int | None]:
            return self._partitions[number].store_forwarded(
                [groups[place] for place in places[number]],
                [sources[place] for place in places[number]],
                origin,
                options,
            )

        found: dict[int, int | None] = {}
        for number, stored in self._reach.each(places, store).items():
            for place, seq in zip(places[number], stored, strict=True):
                found[place] = None if seq is None else self._id(number, seq)
        return [found[place] for place in range(len(groups))]

    # take

    def _take_request(
        self,
        count: int,
        at_least: int | None,
        status: AnyStatus,
        where: Mapping[str, Any] | None,
    ) -> TakeRequest:
        request = super()._take_request(count, at_least, status, where)
        limits = [partition.opened.description.limit for partition in self._partitions]
        if all(limits) and sum(limits) < request.least:
            raise ConfigError(
                f"task {self.task!r} holds at most {sum(limits)} groups: a batch of {count} can "
                "never be full. Take fewer, or raise the limit."
            )
        return request

    @property
    def consumer(self) -> str:
        """Names under which this object holds leases, one of each partition."""
        return ",".join(partition.consumer for partition in self._partitions)

    def dismiss(self, consumer: str) -> int:
        """Requeue the groups that a dead consumer of this group leases."""
        names = consumer.split(",") if isinstance(consumer, str) else []
        if len(names) != len(self._partitions):
            raise ConfigError(
                f"consumer={consumer!r:.80}: give the `consumer` of a stream with "
                f"{len(self._partitions)} partitions."
            )
        return self._sum(lambda number: self._partitions[number].dismiss(names[number]))

    @property
    def incarnation(self) -> str:
        """Incarnations of all partitions, separated by dots."""
        return ".".join(partition.incarnation for partition in self._partitions)

    def settle(self, trained: Mapping[int, int], *, incarnation: str) -> int:
        """Acknowledge groups by id when a run resumes from a checkpoint."""
        names = incarnation.split(".") if isinstance(incarnation, str) else []
        if len(names) != len(self._partitions):
            raise ConfigError(f"incarnation={incarnation!r:.80}: give lease.incarnation.")
        places = self._numbering.by_partition(trained)

        def settle(number: int) -> int:
            here = {seq: trained[self._id(number, seq)] for seq in places[number]}
            return self._partitions[number].settle(here, incarnation=names[number])

        return self._sum(settle, places)

    def join_group(self, start: int | Literal["newest"] | None = None) -> None:
        """Register this consumer group now; an id as `start` is refused: ids are not in order."""
        if isinstance(start, int):
            raise ConfigError(
                f"start={start}: ids of a task with partitions are not in the order of arrival. "
                'Give None or "newest".'
            )
        self._each(lambda number: self._partitions[number].join_group(start))

    # task

    def count(
        self, status: AnyStatus = Status.COMPLETED, where: Mapping[str, Any] | None = None
    ) -> int:
        """Return how many groups wait, the sum of all partitions that can be reached."""
        return sum(
            self._reach.ask(lambda each: self._partitions[each].count(status, where)).values()
        )

    def stats(self) -> StreamStats:
        """Return ledger and counters: sums of all partitions, each from one moment.

        Partitions that cannot be reached are left out, and named in `missing_partitions`.
        """
        found = self._reach.ask(lambda number: self._partitions[number].stats())
        missing = [each for each in range(len(self._partitions)) if each not in found]
        return StreamStats.summed(list(found.values()), missing)

    def staleness(self, current_version: int | None = None) -> StalenessReport:
        """Return how stale the groups of all partitions are that can be reached."""
        version = self.stats().version or None if current_version is None else current_version
        found = self._reach.ask(lambda number: self._partitions[number].staleness(version))
        return summed_reports(list(found.values()))

    def read(self, ids: Sequence[int]) -> list[StoredGroup | None]:
        """Return groups by id without taking them, in the order of `ids`."""
        wanted = checked_ids(ids)
        found: dict[int, StoredGroup | None] = {}
        places = self._places(wanted)
        stored = self._reach.each(places, lambda each: self._partitions[each].read(places[each]))
        for number, groups in stored.items():
            for seq, group in zip(places[number], groups, strict=True):
                found[self._id(number, seq)] = self._named(number, group)
        return [found.get(group) for group in wanted]

    def history(
        self, *, since: datetime | None = None, until: datetime | None = None
    ) -> Iterator[StoredGroup]:
        """Yield the acknowledged groups that the task keeps, in the order of acknowledgement.

        Times are those of the partitions' servers. Where some cannot be reached, the groups of the
        others come first, and then `StoreUnavailable`, which names the missing partitions.
        """

        def named(number: int, partition: Partition) -> Iterator[StoredGroup]:
            for group in partition.history(since=since, until=until):
                yield replace(group, id=self._id(number, group.id))

        found = self._reach.answering()
        histories = [named(number, self._partitions[number]) for number in found]
        yield from heapq.merge(*histories, key=_archived_at)
        missing = [number for number in range(len(self._partitions)) if number not in found]
        if missing:
            raise self._reach.missing(dict.fromkeys(missing))

    def dead_letters(self, count: int = 100) -> list[DeadLetter]:
        """Return the newest dead letters of each partition, `count` of all in turn.

        Partitions that cannot be reached are left out, and a warning in the log names them.
        """
        numbers = self._reach.answering() or range(len(self._partitions))
        of_each = [
            [
                replace(letter, id=letter.id and self._id(number, letter.id))
                for letter in self._partitions[number].dead_letters(count)
            ]
            for number in numbers
        ]
        longest = max(map(len, of_each))
        in_turn = [found[at] for at in range(longest) for found in of_each if at < len(found)]
        return in_turn[:count]

    def requeue(self, ids: Iterable[int]) -> int:
        """Let dead letters of this consumer group wait again in their partitions."""
        places = self._places(checked_letters(ids))
        return self._sum(lambda number: self._partitions[number].requeue(places[number]), places)

    def drop_dead_letters(self, ids: Iterable[int]) -> int:
        """Delete dead letters of this consumer group for good."""
        places = self._places(checked_letters(ids))
        return self._sum(
            lambda number: self._partitions[number].drop_dead_letters(places[number]), places
        )

    def settings(self) -> StoredSettings:
        """Return the settings of the whole task; the changes are those of its first partition."""
        return summed_settings([partition.settings() for partition in self._partitions])

    def _configure(self, changes: Mapping[str, Any]) -> None:
        """Change one partition after the other, each in one atomic step.

        Those with groups come first: one that refuses an order refuses it before any has changed.
        """
        count = len(self._partitions)
        stored = self._reach.ask(lambda number: _stored(self._partitions[number]))
        self._reach.each(
            sorted(range(count), key=lambda number: stored.get(number, 0), reverse=True),
            lambda number: self._partitions[number].opened.configure(
                divided(changes, number, count)
            ),
        )

    def advance(self, version: int) -> int:
        """Give all partitions the newest weight version; returns the oldest that one knows."""
        return min(self._each(lambda number: self._partitions[number].advance(version)).values())

    def move(self, ids: Iterable[int], status: AnyStatus) -> int:
        """Move waiting groups to another status, each in one atomic step."""
        places = self._places(checked_ids(ids))
        return self._sum(
            lambda number: self._partitions[number].move(places[number], status), places
        )

    def update_priority(self, ids: Sequence[int], priorities: Sequence[float]) -> int:
        """Change the priority of groups, waiting or leased."""
        wanted = checked_ids(ids)
        if len(wanted) != len(priorities):
            raise ConfigError(f"{len(wanted)} ids and {len(priorities)} priorities: one for each.")
        chosen: dict[int, tuple[list[int], list[float]]] = {}
        for group, priority in zip(wanted, priorities, strict=True):
            seqs, numbers = chosen.setdefault(self._numbering.partition(group), ([], []))
            if self._numbering.seq(group):
                seqs.append(self._numbering.seq(group))
                numbers.append(priority)
        return self._sum(
            lambda number: self._partitions[number].update_priority(*chosen[number]), chosen
        )

    def expire(
        self,
        current_version: int | None = None,
        *,
        max_staleness: int | None = None,
        max_token_staleness: int | None = None,
        statuses: Sequence[AnyStatus] = (Status.COMPLETED,),
        on_expired: OnExpired | Callable[[list[BufferItem]], object] | None = None,
    ) -> int:
        """Expire the waiting groups that are too stale, one partition after the other."""
        return self._sum(
            lambda number: self._partitions[number].expire(
                current_version,
                max_staleness=max_staleness,
                max_token_staleness=max_token_staleness,
                statuses=statuses,
                on_expired=on_expired,
            )
        )

    # saving

    def save(self, path: AnyPath) -> SavedTask:
        """Save all partitions into a directory, one after the other; see docs/saving.md."""
        return save_partitions(self._stores, path)

    def resume(self, path: AnyPath) -> SavedTask:
        """Fill this task, which holds no groups, from a directory with as many partitions."""
        resumed = resume_partitions(self._stores, path)
        for partition in self._partitions:
            partition.opened.reopen()
        return resumed

    # the end

    def drop_group(self) -> int:
        """Remove this consumer group from all partitions, one after the other."""
        return self._sum(lambda number: self._partitions[number].drop_group())

    def clear(self) -> int:
        """Delete the task, one partition after the other; the first one last.

        While it lasts other processes see the partitions that are left.
        """
        return sum(partition.clear() for partition in reversed(self._partitions))

    def close(self) -> None:
        """Stop the heartbeats and requeue what is still leased; closing twice does no harm.

        Where a partition cannot be reached, the others are closed, and another `close` goes on.
        """
        self._closed = True
        with Deadline(self._task.store.client.retry_s):
            self._each(lambda number: self._partitions[number].close())

    @property
    def _stores(self) -> list[TaskStore]:
        return [partition.opened.store for partition in self._partitions]

    def _each(self, call: Callable[[int], T]) -> dict[int, T]:
        """Call a function with the number of each partition; raises as `Reach.each` does."""
        return self._reach.each(range(len(self._partitions)), call)

    def _sum(self, call: Callable[[int], int], numbers: Iterable[int] | None = None) -> int:
        """Return the sum of the results of a call of partitions, of all if none are given."""
        return sum(
            (self._each(call) if numbers is None else self._reach.each(numbers, call)).values()
        )

    def _places(self, ids: Iterable[int]) -> dict[int, list[int]]:
        """Return the numbers of groups in their partitions, by partition."""
        places = self._numbering.by_partition(ids)
        return {number: [seq for seq in seqs if seq] for number, seqs in places.items()}

    def _id(self, number: int, seq: int) -> int:
        return self._numbering.ids(number, [seq])[0]

    def _named(self, number: int, group: StoredGroup | None) -> StoredGroup | None:
        return None if group is None else replace(group, id=self._id(number, group.id))


def _archived_at(group: StoredGroup) -> float:
    return group.archived_at.timestamp() if group.archived_at else 0.0


def _stored(partition: Partition) -> int:
    store = partition.opened.store
    return int(store.client.execute("XLEN", store.keys.stream))
