"""`RankLease`: a rank's part of a batch, which rank 0 leases as a whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from redrb.codec import GroupLayout
from redrb.connection.client import Request
from redrb.errors import LeaseLost
from redrb.stream.take.calls import Finish, Outcome
from redrb.stream.take.cause import NO_CAUSE, Cause
from redrb.stream.take.lease import Lease
from redrb.stream.take.part import Chosen, LeasePart
from redrb.stream.task.store import TaskStore


@dataclass(frozen=True, slots=True)
class Share:
    """The holder of a part: it may take groups out of the lease, which rank 0 renews and ends."""

    store: TaskStore
    group: str
    consumer: str
    slot: str
    token: str

    def end_request(
        self,
        outcome: Outcome,
        ids: Sequence[int],
        *,
        reason: Cause,
        samples: int,
        ends: bool,  # noqa: ARG002 (the lease has groups of other ranks)
    ) -> Request[str]:
        """Return the request that ends groups; rank 0 finds out when it ends the others."""
        seqs = list(map(str, ids))
        lease = (self.group, self.consumer, self.slot, self.token)
        finish = Finish(*lease, outcome, seqs, reason, samples, ends=False)
        return finish.as_request(
            self.store.client,
            self.store.script_keys,
            lambda reply: _LOSS if reply == "lost" else "",
        )

    def release(self, ids: Sequence[int]) -> None:
        """Do nothing: the groups stay leased to rank 0."""

    def abandon(self, ids: tuple[int, ...]) -> None:
        """Do nothing: the groups stay leased to rank 0."""


_AGAIN = (
    "Drop the result of training on this step, and start all ranks again from a checkpoint; its "
    "groups wait again."
)
_LOSS = f"rank 0 has lost its lease, or this step has ended. {_AGAIN}"


class RankLease(Lease):
    """A rank's part of the batch of a step.

    The batch is one lease of rank 0. Its `ack`, `release`, `fail` and `abandon` without ids end the
    groups of all ranks; an `ack` of other ranks is a note in their process. Call it after the
    optimizer step, when all ranks have trained their parts. A GPU may do that step later: so it
    waits until all ranks have read theirs, at most for `lease_ms`. `reject` and `expire`, and all
    calls of rank 0 with ids, end groups of this part only, at once.

    Attributes:
        unread: Waits until all ranks have read their parts, and returns why one has not.
    """

    unread: Callable[[], str] = str

    def __init__(self, part: LeasePart, whole: LeasePart | None = None) -> None:
        """Make the lease of a rank; rank 0 has the `whole` batch, of which `part` is a part."""
        super().__init__([part])
        self._part, self._whole = part, whole

    def __bool__(self) -> bool:
        """Return whether groups are left to be ended by this rank."""
        return bool(self._part if self._whole is None else self._whole)

    @property
    def unacknowledged(self) -> dict[int, int]:
        """Samples of each group that `ack` will acknowledge, by id: on rank 0 of all ranks."""
        whole = self._whole
        return {seq: each.samples for seq, each in whole.layouts.items()} if whole else {}

    def abandon(self) -> None:
        """Let the heartbeat thread of rank 0 release all groups; never blocks."""
        if self._whole is not None:
            self._whole.abandon()
        super().abandon()

    def _end(self, outcome: Outcome, ids: Collection[int] | None, reason: Cause = NO_CAUSE) -> None:
        whole = self._whole
        if whole is None or ids is not None or outcome in ("reject", "expire"):
            super()._end(outcome, ids, reason)
            return
        self._check_held()
        if outcome == "ack" and (unread := self.unread()):
            lost = LeaseLost(task=whole.task, ids=whole.ids, why=f"{unread}. {_AGAIN}")
            self._end("release", None)
            raise lost
        self._end_whole(outcome, whole, whole.ids, reason)
        self._part.note_ended(self._part.ids)

    def _end_parts(self, outcome: Outcome, chosen: Chosen, reason: Cause = NO_CAUSE) -> None:
        ids, whole = tuple(seq for _, seqs in chosen for seq in seqs), self._whole
        if whole is not None:
            held = tuple(seq for seq in ids if seq in whole.layouts)
            self._end_whole(outcome, whole, held, reason)
        elif outcome != "ack":
            super()._end_parts(outcome, chosen, reason)
            return
        self._part.check_own()
        self._part.note_ended(ids)

    def _end_whole(
        self, outcome: Outcome, whole: LeasePart, ids: tuple[int, ...], reason: Cause
    ) -> None:
        """End groups of the lease of all ranks; if it is lost, so is the part."""
        try:
            super()._end_parts(outcome, [(whole, ids)], reason)
        except LeaseLost:
            self._part.abandon()
            raise


def without_payload(layout: GroupLayout) -> GroupLayout:
    """Return what the end of a group asks for: rank 0 does not keep the payload of all ranks."""
    light = GroupLayout()
    light.samples, light.nbytes = layout.samples, layout.nbytes
    return light
