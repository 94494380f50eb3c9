"""Leases that are held until the optimizer has stepped on them."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from redrb.errors import LeaseLost
from redrb.stream import Lease


class HeldLeases:
    """Leases in the order in which they are trained, each with the count at which it is trained.

    The count is any number that only grows, such as that of forward passes.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[Lease, int]] = deque()

    def hold(self, lease: Lease, trained_at: int) -> None:
        """Keep a lease until `acknowledge` is called with a count of at least `trained_at`."""
        self._held.append((lease, trained_at))

    def acknowledge(self, count: int) -> None:
        """Acknowledge the leases that are trained at `count`."""
        while self._held and self._held[0][1] <= count:
            lease, _ = self._held.popleft()
            lease.ack()

    def end(self, error: object = None) -> None:
        """Requeue all groups; while an exception ends the trainer, as a failed delivery of each."""
        while self._held:
            lease, _ = self._held.popleft()
            with suppress(LeaseLost):  # its groups are requeued already
                if isinstance(error, Exception):
                    lease.fail(error)
                else:
                    lease.release()
