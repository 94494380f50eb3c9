"""`RankPart`: the place in Redis that holds a rank's part of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redrb.errors import ConfigError, LeaseLost
from redrb.stream.ranks.scripts import Loss, RankStep, RankStore
from redrb.stream.take.cause import Cause
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
        self, outcome: Outcome, ids: Sequence[int], *, reason: Cause, samples: int, ends: bool
    ) -> bool:
        """End the part, or reject or expire groups of it.

        Raises:
            ConfigError: Only some groups are to be acknowledged or released.
            LeaseLost: Another process is this rank, or the step was formed anew, or the ranks have
                ended.
        """
        if not ends and outcome in ("ack", "release", "fail"):
            raise ConfigError(
                f"{outcome}(ids): a rank's part ends as a whole. Call {outcome}() without ids; "
                "reject(reason, ids) and expire(ids) take single groups out before."
            )
        loss = self.store.finish(
            self.consumer, self.place, outcome, ids, reason=reason, samples=samples
        )
        if loss is not None:
            raise LeaseLost(task=self.task, ids=tuple(ids), why=self._reason(loss))
        return True

    def _reason(self, loss: Loss) -> str:
        """Return why the part is lost, and what to do."""
        if loss == "replaced":
            return (
                f"another process has taken rank {self.place.rank} over. Drop the result of "
                "training on them, and give every process a different rank."
            )
        if loss == "anew":
            return (
                f"step {self.place.step} was formed anew, because deliveries of a part of it "
                "failed too often. Drop the result of training on them, and take it again."
            )
        return (
            f"rank {self.place.rank} was silent for longer than lease_ms, and step "
            f"{self.place.step} has ended since, or the ranks began anew. Go on with the next step."
        )

    def abandon(self, ids: tuple[int, ...]) -> None:
        """Do nothing: the part is kept for this rank."""
