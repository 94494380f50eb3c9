"""`RankPart`: the place in Redis that holds a rank's part of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redrb.errors import ConfigError, LeaseLost
from redrb.stream.ranks.scripts import RankStep, RankStore
from redrb.stream.take.scripts import Outcome


@dataclass(frozen=True, slots=True)
class RankPart:
    """The holder of a rank's lease: its part of one step, kept until all ranks acknowledge.

    Attributes:
        store: The ranks in Redis.
        task: Name of the task.
        consumer: The process that is this rank.
        place: The rank and its step.
    """

    store: RankStore
    task: str
    consumer: str
    place: RankStep

    def finish(
        self, outcome: Outcome, ids: Sequence[int], *, reason: str, samples: int, ends: bool
    ) -> bool:
        """End the part, or reject or expire groups of it.

        Raises:
            ConfigError: Only some groups are to be acknowledged or released.
            LeaseLost: Another process holds the part.
        """
        if not ends and outcome in ("ack", "release", "fail"):
            raise ConfigError(
                f"{outcome}(ids): a rank's part ends as a whole. Call {outcome}() without ids; "
                "reject(reason, ids) and expire(ids) take single groups out before."
            )
        held = self.store.finish(
            self.consumer, self.place, outcome, ids, reason=reason, samples=samples
        )
        if not held:
            raise LeaseLost(
                task=self.task,
                ids=tuple(ids),
                why=f"rank {self.place.rank} is held by another process, or step "
                f"{self.place.step} was formed anew. Drop the result of training on them.",
            )
        return held

    def abandon(self, ids: tuple[int, ...]) -> None:
        """Do nothing: the part is kept for this rank."""
