"""Leases that are held until the optimizer has stepped on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

from redrb.errors import LeaseLost
from redrb.stream import Lease


class HeldLeases:
    """Leases in the order in which they are trained, each with the count at which it is trained.

    The count is any number that only grows, such as that of forward passes.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[Lease, int]] = deque()

    def __len__(self) -> int:
        """Return the number of leases that are held."""
        return len(self._held)

    def hold(self, lease: Lease, trained_at: int) -> None:
        """Keep a lease until `acknowledge` is called with a count of at least `trained_at`."""
        self._held.append((lease, trained_at))

    def acknowledge(self, count: int) -> int:
        """Acknowledge the leases that are trained at `count`; returns how many."""
        ended = 0
        while self._held and self._held[0][1] <= count:
            lease, _ = self._held.popleft()
            lease.ack()
            ended += 1
        return ended

    def release(self) -> None:
        """Requeue all groups unharmed."""
        self._end_all(lambda lease: lease.release())

    def fail(self, reason: BaseException) -> None:
        """Requeue all groups, and count a failed delivery of each."""
        self._end_all(lambda lease: lease.fail(reason))

    def _end_all(self, end: Callable[[Lease], None]) -> None:
        while self._held:
            lease, _ = self._held.popleft()
            with suppress(LeaseLost):  # its groups are requeued already
                end(lease)
