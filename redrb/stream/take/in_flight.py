"""A take in flight, and the loop over leases, which sends each take before it is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from redrb.connection.deadline import Deadline
from redrb.connection.request import Request
from redrb.errors import LeaseLost
from redrb.stream.take.calls import TakeReply, TakeRequest
from redrb.stream.take.consumer import Slot
from redrb.stream.take.lease import Lease
from redrb.stream.take.part import LeasePart

if TYPE_CHECKING:
    from redrb.stream.take.taker import Taker

RELEASE_RETRY_S = 1.0
"""How long Redis may be away while an unread take is released."""


class TakeUnderWay(Protocol):
    """A take that was sent and whose reply is read later."""

    def receive(self) -> bool:
        """Read the reply; returns whether the batch was full and is leased."""

    def lease(self) -> Lease | None:
        """Return the lease on the batch received; None if it was not usable."""

    def abandon(self) -> None:
        """Let a background thread release the batch; never blocks."""


class Takes(Protocol):
    """Takes full batches: `Taker`."""

    def take(self, request: TakeRequest, ack: Lease | None = None) -> Lease:
        """Lease all groups of a request, or none."""

    def send(self, request: TakeRequest, ack: Lease | None = None) -> TakeUnderWay:
        """Send a take that does not queue."""

    def is_fresh(self, lease: Lease) -> bool:
        """Return whether a batch that was taken ahead may be handed over."""


@dataclass(eq=False, repr=False)
class InFlightTake:
    """A take that was sent and whose reply is read later; `before` is the lease that it ends.

    It has the slot until its lease exists, its reply leased nothing, or an error gave the slot up.
    """

    _taker: Taker
    _slot: Slot
    _request: TakeRequest
    _sent: Request[TakeReply]
    _before: LeasePart | None
    seen: TakeReply | None = None
    _unread: bool = True
    _reply: TakeReply | None = None  # of a batch that was received and has no lease yet

    def receive(self) -> bool:
        """Read the reply; returns whether the batch was full and is leased.

        Raises:
            LeaseLost: Another consumer has taken the lease to acknowledge over; nothing was taken.
        """
        try:
            self._unread = False
            reply = self.seen = self._sent.result()
            if self._before is not None:
                self._taker.note_acknowledged(self._before, self._slot, reply)
            if reply.outcome == "taken":
                self._reply = reply
            else:
                self._slot.free()
            return self._reply is not None
        except LeaseLost:  # the batch is released
            self._slot.free()
            raise
        except BaseException:
            self._reply = None
            self._slot.give_up()
            raise

    def lease(self) -> Lease | None:
        """Return the lease on the batch received; None if a group of it could not be decoded."""
        try:
            reply, self._reply = self._reply, None
            if reply is None:
                return None
            return self._taker.claimed(self._slot, self._request, reply)
        except BaseException:
            self._slot.give_up()
            raise

    def release(self) -> None:
        """Read the reply if it is unread, and release the batch if it has no lease."""
        if self._unread:
            with Deadline(repeat_s=RELEASE_RETRY_S):
                self.receive()
        reply, self._reply = self._reply, None
        if reply is not None:
            ids = [seq for seq, _ in reply.entries]
            try:
                self._slot.release(ids)
            except BaseException:
                self._slot.give_up()
                raise

    def abandon(self) -> None:
        """Let the heartbeat thread read the reply and release the batch; never blocks."""
        self._slot.abandon_take(self)
