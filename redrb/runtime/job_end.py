"""How a maker learns that the job is over: a thread that follows what its trainers announce."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.connection.stop import Stop
from redrb.errors import RedrbError, StoreClosed
from redrb.keys import trainer_key
from redrb.runtime.announcements import Announcement, AnnouncementReader

_log = logging.getLogger("redrb")

GRACE_S = 30.0
"""How long an end that was announced before a maker began may still be taken back."""

_WAIT_S = 2.0
"""Longest wait for an announcement; then the thread checks whether it is to end."""

_PAUSE_S = 1.0
"""Pause after an error."""


class JobEnd:
    """Asks a maker's loop to end when the trainer that it follows has announced the end of the job.

    A maker that sends to several trainers goes on until all of them have. An end that a maker finds
    when it begins is often that of an earlier run, whose successor starts at the same moment, so
    the maker first waits whether a trainer takes it back.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        followed: Callable[[], str],
        others: Sequence[str],
        stop: Stop,
    ) -> None:
        """Make it; `watching` starts the thread.

        Args:
            client: Connection to Redis.
            namespace: Namespace of maker and trainers.
            followed: Returns the name of the trainer whose weights the maker follows.
            others: Names of further trainers that get its experience.
            stop: Is asked when the job is over.
        """
        self._client = client
        self._namespace = namespace
        self._followed = followed
        self._others = others
        self._stop = stop
        self._readers: dict[str, AnnouncementReader] = {}
        self._newest: dict[str, Announcement] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run the thread in this block; it ends soon after."""
        over = Stop()
        thread = threading.Thread(target=self._run, args=(over,), name="redrb-job-end", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.ask()

    def _run(self, over: Stop) -> None:
        grace_ends = time.monotonic() + GRACE_S
        began = True
        with Deadline(stop=over):
            while not (over or self._stop):
                try:
                    running = self._running()
                    if running is None and (not began or time.monotonic() >= grace_ends):
                        if not over:
                            self._stop.ask(self._reason())
                        return
                    began = began and running is None
                    self._read(running or self._followed(), _WAIT_S)
                except StoreClosed:
                    return
                except RedrbError as error:
                    if not over:
                        _log.debug("a maker cannot see whether its job is over: %s", error)
                    over.wait(_PAUSE_S)

    def _running(self) -> str | None:
        """Return a trainer that has not announced the end; None: all have."""
        followed = self._followed()
        for name in dict.fromkeys((followed, *self._others)):
            self._read(name)
            newest = self._newest.get(name)
            if newest is None:  # of the others, some are names of tasks, and no trainers
                if name == followed:
                    return name
            elif not newest.ended:
                return name
        return None

    def _read(self, name: str, wait_s: float = 0.0) -> None:
        """Read the newest announcement of a trainer, or wait for one."""
        if name not in self._readers:
            key = trainer_key(self._namespace, name)
            self._readers[name] = AnnouncementReader(self._client, key)
        announcement = self._readers[name].newest(wait_s)
        if announcement is not None:
            self._newest[name] = announcement

    def _reason(self) -> str:
        followed = self._followed()
        return f"trainer {followed!r} has ended the job: {self._newest[followed].ended}"
