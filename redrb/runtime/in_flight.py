"""A maker's weight updates in mid-generation: fetched beside it, swapped in between two tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from redrb.errors import DecodeError, StoreUnavailable, WeightError
from redrb.runtime.following import WeightFollower
from redrb.runtime.model_updates import ModelUpdates
from redrb.weights.reading.background_fetch import BackgroundFetch


class InFlightUpdates(BackgroundFetch):
    """Follows announcements in a thread, and lets generation swap updates in between tokens."""

    def __init__(self, follower: WeightFollower, models: ModelUpdates) -> None:
        super().__init__("redrb-in-flight")
        self._follower = follower
        self._models = models
        self._error: Exception | None = None
        self._fetched = threading.Event()  # the thread has fetched an update, or failed

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the thread during this block; a fetch that is under way ends in the background."""
        self._start()
        try:
            yield
        finally:
            self._end()

    def swap(self) -> int | None:
        """Load the fetched update, if there is one; `check` raises an error that came up.

        Returns:
            The version that the models have.
        """
        try:
            self._swap_in(self._models.held())
        except (WeightError, DecodeError) as error:
            self._error = error
        return self._follower.version

    def await_version(self, least: int, seconds: float) -> None:
        """Load what the thread fetches until the models have version `least`, for a while."""
        end = time.monotonic() + seconds
        while True:
            self._fetched.clear()
            if (self.swap() or 0) >= least or self._error is not None:
                return
            left = end - time.monotonic()
            if left <= 0 or not self._fetched.wait(left):
                return

    def check(self) -> None:
        """Raise the error since the last call; while Redis is away, raise that at each call.

        Raises:
            As `WeightFollower.follow` does.
        """
        error = self._error
        if error is not None:
            if not isinstance(error, StoreUnavailable):
                self._error = None
            raise error

    def _fetch_next(self, wait_s: float) -> None:
        if self._follower.prepare(wait_s):
            self._fetched.set()
        if isinstance(self._error, StoreUnavailable):
            self._error = None

    @property
    def _is_ready(self) -> bool:
        return self._follower.ready

    @property
    def _is_fetching(self) -> bool:
        return self._follower.fetching

    def _load(self) -> bool:
        return self._follower.load()

    def _failed(self, error: Exception) -> None:
        self._error = error
        self._fetched.set()
