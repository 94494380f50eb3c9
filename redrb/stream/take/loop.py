"""`LeaseLoop`: an iterator over leases, each acknowledged when the next one is asked for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Self

from redrb.forks import in_child
from redrb.scopes import Closing
from redrb.stream.take.lease import Lease
from redrb.stream.take.read_ahead import ReadAhead
from redrb.stream.worker import Steps


class LeaseLoop(Closing):
    """An iterator over leases, each acknowledged when the next one is asked for.

    See `ExperienceStream.leases`. A loop that nothing refers to any more is closed.
    """

    def __init__(
        self, begin: Callable[[], ReadAhead[None]], check_open: Callable[[], None], steps: Steps
    ) -> None:
        self._begin, self._check_open, self._steps = begin, check_open, steps
        self._closed = False
        self._forget()
        in_child(self._forget)

    def _forget(self) -> None:
        """Hold no batch: at first, and in a forked process, whose parent has them."""
        self._ahead: ReadAhead[None] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Lease:
        """Return the next lease; raises as `ExperienceStream.take` does, and the loop is over."""
        batch = None
        try:
            self._check_open()
            if not self._closed:
                with self._steps.fetching():
                    batch = self._opened().next()
        finally:
            if batch is None:
                self.close()
        if batch is None:
            raise StopIteration
        return batch[0]

    def _opened(self) -> ReadAhead[None]:
        if self._ahead is None:
            self._ahead = self._begin()
            weakref.finalize(self, self._ahead.stop).atexit = False
        return self._ahead

    def close(self) -> None:
        """End the loop, and release the batches that it holds; closing twice does no harm."""
        self._closed = True
        if self._ahead is not None:
            self._ahead.close()
