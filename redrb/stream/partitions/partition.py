"""`Partition`: one partition of a task, a stream with keys and limits of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from redrb.connection import Client
from redrb.errors import TaskMismatch
from redrb.keys import TaskKeys
from redrb.stream.partitions.settings import part_of
from redrb.stream.put.preparer import Preparer
from redrb.stream.put.producer import Producer
from redrb.stream.ranks.ranks import Ranks
from redrb.stream.stream import ExperienceStream
from redrb.stream.take.consumer import Consumer
from redrb.stream.take.taker import Taker
from redrb.stream.task.description import TaskDescription
from redrb.stream.task.settings import TaskSettings
from redrb.stream.task.task import Task


class Partition(ExperienceStream):
    """One partition of a task.

    Attributes:
        number: Its number, from 0 on.
    """

    _producer: Producer
    _taker: Taker
    _ranks: Ranks

    def __init__(
        self,
        client: Client,
        task: str,
        number: int,
        settings: TaskSettings,
        implied: TaskSettings,
        *,
        like: Partition | None = None,
        **options: Any,
    ) -> None:
        """Open a partition; settings and options are those of the whole task.

        Nothing is sent if `like` is given: another partition, on which this one, which cannot be
        reached now, is modelled until it can be opened.
        """
        self.number = number
        self._like = like
        self._count = settings.partitions or 1
        try:
            super().__init__(
                *(client, task),
                settings=part_of(settings, number),
                implied=replace(part_of(implied, number), partitions=None),
                **options,
            )
        except TaskMismatch as error:
            if self._count > 1:
                error.add_note(
                    f"This is partition {number} of {self._count}; each has its part of the limits."
                )
            raise

    def _keys(self, namespace: str, task: str) -> TaskKeys:
        return TaskKeys.of_partition(namespace, task, self.number, self._count)

    def _description(self) -> TaskDescription | None:
        return None if self._like is None else self._like.opened.description

    @property
    def opened(self) -> Task:
        """The partition as a task."""
        return self._task

    @property
    def preparer(self) -> Preparer:
        """Checks and encodes groups."""
        return self._preparer

    @property
    def producer(self) -> Producer:
        """Puts into the partition."""
        return self._producer

    @property
    def taker(self) -> Taker:
        """Takes from the partition."""
        return self._taker

    @property
    def holder(self) -> Consumer:
        """Holds leases in the partition."""
        return self._consumer

    @property
    def ranks(self) -> Ranks:
        """Takes the parts of a rank."""
        return self._ranks
