"""`Numbering`: ids of groups in the whole task, which name the partition too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Numbering:
    """The ids of the groups of a task; of one with a single partition, the numbers there.

    Each partition counts its groups from 1 on. The id of a group in the whole task is its number in
    its partition times the number of partitions, plus the number of the partition.
    """

    partitions: int

    def ids(self, partition: int, seqs: Iterable[int]) -> tuple[int, ...]:
        """Return the ids of groups of one partition."""
        if self.partitions == 1:
            return tuple(seqs)
        return tuple([seq * self.partitions + partition for seq in seqs])

    def partition(self, group: int) -> int:
        """Return the partition of a group."""
        return group % self.partitions

    def seq(self, group: int) -> int:
        """Return the number of a group in its partition; 0 if there is no such group."""
        return group // self.partitions

    def by_partition(self, ids: Iterable[int]) -> dict[int, list[int]]:
        """Return the numbers of groups in their partitions, by partition."""
        found: dict[int, list[int]] = {}
        for group in ids:
            found.setdefault(self.partition(group), []).append(self.seq(group))
        return found


ONE_PARTITION = Numbering(1)
