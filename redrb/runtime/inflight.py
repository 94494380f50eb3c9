"""Weights that change in mid-generation: fetched beside it, swapped in by who generates."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from redrb.connection.stopping import Stop, stoppable
from redrb.errors import DecodeError, StoreUnavailable, WeightError
from redrb.runtime.following import WeightFollower
from redrb.runtime.model_updates import ModelUpdates
from redrb.weights.reading.handover import Handover

_SLICE_S = 0.5
"""Longest wait for an announcement before it is looked whether this is over."""

_PAUSE_S = 0.5
"""Pause after an error."""

_END_S = 2.0


class InFlight:
    """Follows announcements in a thread, and lets generation swap between tokens."""

    def __init__(self, follower: WeightFollower, models: ModelUpdates) -> None:
        self._follower = follower
        self._models = models
        self._trouble: Exception | None = None
        self._handover = Handover()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Fetch in a thread while this block runs; a fetch under way ends in the background."""
        stop = Stop()
        thread = threading.Thread(
            target=self._run, args=(stop,), name="redrb-in-flight", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            stop.ask()
            self._handover.taken()
            thread.join(_END_S)

    def swap(self) -> int | None:
        """Load what was fetched, if anything was; returns the version that the models have.

        What goes wrong is told by `check`.
        """
        if self._follower.ready:
            try:
                with self._models.held():
                    if self._follower.load():
                        self._handover.taken()
                    else:
                        self._handover.missed()
            except (WeightError, DecodeError) as error:
                self._trouble = error
        elif self._follower.fetching:
            self._handover.missed()
        return self._follower.version

    def check(self) -> None:
        """Raise what went wrong since the last call, that Redis is away as long as it is.

        Raises:
            As `WeightFollower.follow` does.
        """
        trouble = self._trouble
        if trouble is not None:
            if not isinstance(trouble, StoreUnavailable):
                self._trouble = None
            raise trouble

    def _run(self, stop: Stop) -> None:
        with stoppable(stop):
            while not stop.asked:
                try:
                    self._follower.prepare(_SLICE_S)
                    self._handover.give_way(lambda: self._follower.ready, stop)
                    if isinstance(self._trouble, StoreUnavailable):
                        self._trouble = None
                except Exception as error:  # noqa: BLE001 (it is raised by the next check)
                    if not stop.asked:
                        self._trouble = error
                    stop.wait(_PAUSE_S)
