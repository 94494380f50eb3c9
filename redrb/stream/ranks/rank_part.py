"""`RankPart`: the place in Redis that holds a rank's part of a step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from msgspec.structs import replace

from redrb.connection.request import Request
from redrb.errors import ConfigError
from redrb.stream.ranks.calls import FinishPart, Loss, PartEnd, RankStep
from redrb.stream.take.calls import Outcome
from redrb.stream.take.cause import NO_CAUSE, Cause
from redrb.stream.task.store import TaskStore


@dataclass(frozen=True, slots=True)
class RankPart:
    """The holder of a rank's lease: its part of one step, kept until all ranks acknowledge.

    Attributes:
        consumer: The process that is this rank.
    """

    store: TaskStore
    group: str
    consumer: str
    place: RankStep
    whole: ClassVar[Collection[Outcome]] = ("ack", "release", "fail")

    def end_request(
        self, outcome: Outcome, ids: Sequence[int], *, reason: Cause, samples: int, ends: bool
    ) -> Request[str]:
        """Return the request that ends the part, or rejects or expires groups of it.

        The part is lost if another process is this rank, the step was formed anew, or the ranks
        have ended.
        """
        if not ends and outcome in self.whole:
            raise ConfigError(
                f"{outcome}(ids): a rank's part ends as a whole. Call {outcome}() without ids; "
                "reject(reason, ids) and expire(ids) take single groups out before."
            )
        part = (self.group, self.consumer, self.place.rank, self.place.step)
        finish = FinishPart(*part, outcome, tuple(map(str, ids)), reason, samples)

        def read(end: PartEnd) -> str:
            if end.more:  # a page of the step's groups was acknowledged
                *_, end = self.store.pages(replace(finish, seqs=()))
            return self._reason(end.loss)

        return self.store.request(finish, read)

    def release(self, ids: Sequence[int]) -> None:
        """Keep the part for this rank."""
        self.end_request("release", ids, reason=NO_CAUSE, samples=0, ends=True).result()

    def _reason(self, loss: Loss) -> str:
        """Return why the part is lost, and what to do; "" if it is not."""
        if not loss:
            return ""
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
