"""`Partition`: one partition of a task, open for puts and takes. Every task has at least one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from redrb.connection import Client
from redrb.errors import ConfigError, TaskMismatch
from redrb.stream.admission.admitter import Admitter
from redrb.stream.assembly.collector import PartCollector
from redrb.stream.options import StreamOptions
from redrb.stream.partitions.settings import part_of
from redrb.stream.put.filters import Filter
from redrb.stream.put.preparer import Preparer
from redrb.stream.put.producer import Producer
from redrb.stream.put.receiver import Receiver
from redrb.stream.put.refusals import OnBadGroup
from redrb.stream.put.replication import Replication
from redrb.stream.ranks.ranks import Ranks
from redrb.stream.take.consumer import Consumer
from redrb.stream.take.taker import Taker
from redrb.stream.task.expiration import Expiration
from redrb.stream.task.reach import Reach
from redrb.stream.task.settings import TaskSettings
from redrb.stream.task.store import TaskStore
from redrb.stream.task.task import Task
from redrb.stream.worker import Worker

MOST_PARTITIONS = 1024


class Partition:
    """One partition of a task: the objects that put into it, and take from it.

    Attributes:
        worker: What this process announces of itself there.
        preparer, producer, receiver, parts: Check and store groups.
        consumer, taker, ranks: Hold and take groups.
    """

    def __init__(self, task: Task, options: StreamOptions) -> None:
        replicas = options.min_replicas
        client_wide = task.store.client.min_replicas
        replication = Replication(client_wide if replicas is None else replicas)

        def preparer(filters: Sequence[Filter], on_bad_group: OnBadGroup) -> Preparer:
            return Preparer(task, filters, frozenset(options.checks), on_bad_group)

        self.task, self.store = task, task.store
        self.worker = worker = Worker(task, options.lease_ms)
        self.expiration = Expiration(task, options.group)
        self.preparer = preparer(options.filters, options.on_bad_group)
        self.producer = Producer(task, options.on_full, replication, options.on_bad_group, worker)
        self.receiver = Receiver(task, self.producer, self.preparer.prepare)
        self.admitter = Admitter(task, options.lease_ms, worker)
        self.parts = PartCollector(
            task, preparer((), "raise"), self.preparer.prepare, self.producer, replication
        )
        self.consumer = Consumer(
            task,
            options.group,
            options.lease_ms,
            worker,
            options.reader,
            self.parts.finish_due,
            self.admitter.maker.end_dead,
        )
        worker.holds(self.consumer, self.admitter.maker)
        self.taker = Taker(task, self.consumer)
        self.ranks = Ranks(task, self.consumer, self.taker)

    @property
    def incarnation(self) -> str:
        """Incarnation of the partition, as this process last learned it."""
        return self.task.description.incarnation

    def close(self, *, requeue: bool) -> None:
        """Stop the heartbeats, return rights, and requeue leased groups if asked to."""
        consumer = partial(self.consumer.close, requeue=requeue)
        parts = (self.worker.close, self.admitter.maker.close, self.producer.close, consumer)
        with ExitStack() as scope:
            for close in parts:
                scope.callback(close)  # the last one first; one that fails keeps no other open


def open_partitions(
    client: Client,
    task: str,
    settings: TaskSettings,
    implied: TaskSettings | None,
    options: StreamOptions,
    *,
    namespace: str,
    weights: str | None,
    create: bool,
) -> tuple[list[Partition], Reach]:
    """Open all partitions of a task; new ones are created, unless `create` is False.

    Partitions that cannot be reached are opened when they are used and can be reached again, as
    long as one can be reached now.

    Raises:
        As `ExperienceStream.__init__` does.
    """
    settings.as_stored()  # checks the values
    count = settings.partitions or 1
    if count > MOST_PARTITIONS:
        raise ConfigError(f"partitions={count}: give at most {MOST_PARTITIONS}.")
    follows = implied
    if count > 1:
        follows = replace(implied or TaskSettings(), partitions=count)
    stores = TaskStore.of_partitions(client, namespace, task, count)

    def opened(number: int, like: Partition | None = None) -> Partition:
        try:
            partition = Task(
                client,
                stores[number],
                namespace=namespace,
                settings=part_of(settings, number),
                implied=follows and replace(part_of(follows, number), partitions=None),
                weights=weights,
                create=create,
                like=like.task.description if like else None,
            )
        except TaskMismatch as error:
            if count > 1:
                error.add_note(
                    f"This is partition {number} of {count}; each has its part of the limits."
                )
            raise
        return Partition(partition, options)

    reach = Reach(stores)
    found = reach.ask(opened)
    home = next(iter(found.values()))
    home.task.is_advanced = implied is not None
    home.task.log_unbounded(settings)
    partitions = [found.get(number) or opened(number, home) for number in range(count)]
    for each in partitions[1:]:
        each.worker.is_part_of(partitions[0].worker)
        each.task.home = partitions[0].task
    return partitions, reach
