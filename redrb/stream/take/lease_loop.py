"""Takes one batch after another, the next on its way while this one is trained on."""

from __future__ import annotations

from collections.abc import Generator

from redrb.stream.take.consumer import Ahead, Consumer, Wanted
from redrb.stream.take.lease import Lease


def leases(consumer: Consumer, wanted: Wanted, timeout: float | None) -> Generator[Lease]:
    """Yield leases; see `ExperienceStream.leases`."""
    reader = _Reader(consumer, wanted, timeout)
    try:
        while True:
            yield reader.next()
    finally:
        reader.close()


class _Reader:
    """Holds the lease that is trained on, and the take of the next one."""

    def __init__(self, consumer: Consumer, wanted: Wanted, timeout: float | None) -> None:
        self._consumer = consumer
        self._wanted = wanted
        self._timeout = timeout
        self._lease: Lease | None = None
        self._ahead: Ahead | None = None

    def next(self) -> Lease:
        """Acknowledge the last lease, ask for the one after the next, and return the next."""
        done = self._lease if self._lease else None  # its user may have ended it
        lease = None
        while lease is None:
            ahead, self._ahead = self._ahead, None
            reply = None
            if ahead is not None:
                reply = self._consumer.receive(ahead, timeout=self._timeout)
            if ahead is None or reply is None:
                lease = self._consumer.take(self._wanted, self._timeout, done)
                done = None
            self._ahead = self._consumer.begin_take(self._wanted, done)
            done = None
            if ahead is not None and reply is not None:
                lease = self._consumer.lease_of(ahead, reply, self._wanted)
        self._lease = lease
        return lease

    def close(self) -> None:
        """Leave what the loop did not come back for to the consumer's thread, which releases it.

        Nothing is asked of Redis here: a loop that nobody holds any more may be closed while
        garbage is collected, at any point of any code.
        """
        if self._lease:
            self._lease.abandon()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._consumer.abandon_ahead(ahead)
