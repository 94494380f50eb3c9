"""A take in flight, and the loop over leases, which sends each take before it is needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from redrb.connection.deadline import Deadline
from redrb.connection.request import Request
from redrb.errors import LeaseLost
from redrb.forks import in_child
from redrb.scopes import Closing
from redrb.stream.steps import Steps
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


class LeaseLoop(Closing):
    """An iterator over leases, each taken while the one before is trained on.

    See `ExperienceStream.leases`. At the end of a `with` block, by `close`, and when nothing refers
    to it any more, both batches that it holds are handed to the heartbeat thread, which releases
    them at once.
    """

    def __init__(
        self,
        taker: Takes,
        request: TakeRequest,
        timeout: float | None,
        check_open: Callable[[], None],
        steps: Steps,
    ) -> None:
        self._batches = _Batches(taker, request, timeout)
        self._check_open, self._steps = check_open, steps
        self._finalizer = weakref.finalize(self, self._batches.abandon)
        self._finalizer.atexit = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Lease:
        """Return the next lease; raises as `ExperienceStream.take` does, and the loop is over."""
        if not self._finalizer.alive:
            raise StopIteration
        try:
            self._check_open()
            with self._steps.fetching():
                return self._batches.next()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the loop, and release the batches that it holds; closing twice does no harm."""
        self._finalizer()


class _Batches:
    """Holds the lease that is trained on, and the take in flight of the next one.

    An error or an interrupt may come at any line, and `abandon` must find all that is leased.
    """

    def __init__(self, taker: Takes, request: TakeRequest, timeout: float | None) -> None:
        self._taker = taker
        self._request = request
        self._timeout = timeout
        self._begin()
        in_child(self._begin)

    def _begin(self) -> None:
        """Hold no batch: at first, and in a forked process, whose parent has them."""
        self._lease: Lease | None = None
        self._in_flight: TakeUnderWay | None = None
        self._received: TakeUnderWay | None = None  # until its lease exists

    def next(self) -> Lease:
        """Acknowledge the last lease, send the take after the next one, and return the next."""
        with Deadline(self._timeout):
            self._lease = lease = self._next()
        return lease

    def _next(self) -> Lease:
        done = self._lease or None  # the user may have ended it
        while True:
            lease = None
            received = self._received = self._in_flight
            self._in_flight = None
            if received is not None and not received.receive():
                received = self._received = None
            if received is None:
                lease = self._lease = self._taker.take(self._request, done)
                done = None
            self._in_flight = self._taker.send(self._request, done)
            done = None
            if received is not None:
                lease = self._lease = received.lease()
                self._received = None
                if lease is not None and not self._taker.is_fresh(lease):
                    lease = None  # its groups are requeued, and another batch comes
            if lease is not None:
                return lease

    def abandon(self) -> None:
        """Hand all batches to the heartbeat thread, which releases them."""
        # no request is sent here: garbage collection may close a loop, in the middle of any code
        if self._lease:
            self._lease.abandon()
        takes = (self._received, self._in_flight)
        self._received = self._in_flight = None
        for take in takes:
            if take is not None:
                take.abandon()
