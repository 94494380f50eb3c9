"""`each_partition`: the partitions of an open task, each as a stream of its own."""

from __future__ import annotations

from redrb import ExperienceStream
from redrb.stream.open_task import OpenTask
from redrb.stream.partitions.partition import Partition
from redrb.stream.task.entries import ONE_PARTITION
from redrb.stream.task.reach import Reach


class OnePartition(ExperienceStream):
    """One partition; its ids are the numbers there. The stream that it is a part of closes it."""

    def __init__(self, whole: ExperienceStream, partition: Partition) -> None:
        OpenTask.__init__(self, [partition], Reach([partition.store]))
        self.task, self.namespace, self.group = whole.task, whole.namespace, whole.group
        self._numbering = ONE_PARTITION
        self.worker = partition.worker
        self._preparer, self._producer = partition.preparer, partition.producer
        self._consumer, self._admitter = partition.consumer, partition.admitter
        self._taker, self._ranks = partition.taker, partition.ranks


def each_partition(stream: ExperienceStream) -> list[OnePartition]:
    return [OnePartition(stream, partition) for partition in stream._partitions]
