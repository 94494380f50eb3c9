"""`PartitionedRanks`: all ranks take a step's batch from one partition, each step from the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from redrb.errors import WrongStep
from redrb.stream.partitions.partition import Partition
from redrb.stream.ranks.calls import RankStep
from redrb.stream.ranks.ranks import Balance
from redrb.stream.take.calls import TakeRequest
from redrb.stream.take.lease import Lease


class PartitionedRanks:
    """One process as a rank, which takes its part of every step.

    The batch of step s is formed in partition s modulo the number of partitions, where it is step
    s divided by that number: all ranks know the partition without asking.
    """

    def __init__(self, partitions: Sequence[Partition], incarnation: Callable[[], str]) -> None:
        self._partitions = partitions
        self._incarnation = incarnation

    def take(
        self, place: RankStep, take: TakeRequest, balance: Balance | None, timeout: float | None
    ) -> Lease:
        """Lease this rank's part of a step; raises as `Ranks.take` does."""
        count = len(self._partitions)
        here, number = divmod(place.step, count)
        try:
            lease = self._partitions[number].ranks.take(
                replace(place, step=here), take, balance, timeout
            )
        except WrongStep as error:
            raise WrongStep(
                task=error.task,
                step=place.step,
                next_step=error.next_step * count + number,
                why=f"of its partition, {number} of {count}, another step is the next one",
            ) from error
        return lease
