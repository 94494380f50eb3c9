"""A thread that takes, decodes and places batches while others are trained on."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from redrb.connection.stopping import Stop, stoppable
from redrb.errors import BatchTimeout, ConfigError, LeaseLost, StoreError, StoreUnavailable
from redrb.stream import Lease
from redrb.stream.feeding.placing import Placed, Placer

_log = logging.getLogger("redrb")

JOIN_S = 30.0
"""How long `close` waits for the thread: longer than the silence after which a server is away."""

AGAIN_S = 0.5
"""Pause after Redis stayed away longer than the client's own retries last."""

EXIT_S = 3.0
"""How long the end of the process waits for it."""


@dataclass(frozen=True, slots=True)
class Given:
    """A batch and its lease."""

    lease: Lease
    placed: Placed


class Ahead:
    """Batches that are taken ahead, by one thread, in order.

    The thread knows nothing of whoever reads the batches, so that it ends with him: `stop` may be
    called from anywhere, also while garbage is collected. Then it gives back what nobody has.
    """

    def __init__(
        self,
        take: Callable[[int], Lease],
        placer: Placer,
        *,
        prefetch: int,
        steps: int | None,
    ) -> None:
        """Start the thread.

        Args:
            take: Takes the batch of a number, from 0 on; it waits for ever, or until the thread is
                asked to stop.
            placer: Makes it a batch on its device.
            prefetch: Most batches that are taken and not given out.
            steps: Batches in all; None: no end.
        """
        self._take = take
        self._placer = placer
        self._steps = steps
        self._pid = os.getpid()
        self._stopped = False
        self._ended = False
        self._placed = self._given = 0
        self._wanted = -1  # number of the batch whose time is up
        self._looking = Stop()  # of the take that is under way
        self._permits: SimpleQueue[bool] = SimpleQueue()
        self._ready: SimpleQueue[Given | BaseException | None] = SimpleQueue()
        for _ in range(prefetch):
            self._permits.put(True)
        self._thread = threading.Thread(target=self._run, name="redrb-loader", daemon=True)
        _running.add(self)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether nothing more comes."""
        return self._stopped or self._ended

    @property
    def ready(self) -> int:
        """Batches that could be given out now."""
        return 0 if self.over else self._placed - self._given

    def next(self, timeout: float | None) -> Given | None:
        """Return the next batch, as soon as it is there; None at the end, and after `stop`.

        When the time is up the thread looks a last time, and takes what is there if it does. A
        Redis that is away is waited for as long as for a batch.

        Raises:
            BatchTimeout: No batch came in time, and it is over.
            StoreUnavailable: Redis was away when the time was up, and it is over.
            ConfigError: This is another process than that which began.
            BaseException: What went wrong after the batches before; then it is over.
        """
        if self._pid != os.getpid():
            raise ConfigError(
                "this loop was begun before the process forked: begin one of its own here."
            )
        if self.over:
            return None
        try:
            given = self._ready.get(timeout=timeout)
        except Empty:
            self._wanted = self._given
            self._looking.ask()
            given = self._ready.get()
        self._ended = not isinstance(given, Given)
        if isinstance(given, BaseException):
            try:
                raise given
            finally:
                del given  # it holds this frame
        if given is not None:
            self._given += 1
            self._permits.put(True)
        return given

    def stop(self) -> None:
        """Let the thread end; never blocks."""
        if self._pid == os.getpid():
            self._stopped = True
            self._looking.ask()
            self._permits.put(False)

    def close(self, timeout: float = JOIN_S) -> None:
        """Let the thread end, and wait until everything that was not given out is given back."""
        self.stop()
        if self._pid == os.getpid() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
            if self._thread.is_alive():
                _log.warning("a loader's thread waits for Redis and ends later, by itself")

    def _run(self) -> None:
        try:
            self._take_all()
            end: BaseException | None = None
        except BaseException as error:  # noqa: BLE001 (it is raised where batches are read)
            end = error
        self._ready.put(None if self._stopped else end)
        del end
        while not self._stopped:  # what is ready stays so until somebody says stop
            self._permits.get()
        with stoppable(self._looking):
            self._give_back()

    def _take_all(self) -> None:
        number = 0
        while (self._steps is None or number < self._steps) and self._permits.get():
            lease = self._taken(number)
            with ExitStack() as scope:
                scope.push(lease)  # where decoding fails it ends as in `with lease`
                given = Given(lease, self._placer.place(lease))
                scope.pop_all()
            self._ready.put(given)
            self._placed += 1
            del given, lease  # what is ready belongs to whoever gets it
            number += 1

    def _taken(self, number: int) -> Lease:
        """Take a batch, however long it takes, and however long Redis is away.

        Raises:
            BatchTimeout, StoreUnavailable: Its time is up, or nobody wants it any more.
        """
        while True:
            looking = self._looking = Stop()
            if self._stopped or self._wanted == number:  # who said so saw the one before
                looking.ask()
            try:
                with stoppable(looking):
                    return self._take(number)
            except (BatchTimeout, StoreUnavailable) as error:
                if self._stopped or self._wanted == number:
                    raise
                if looking.asked:  # who asked meant the batch before
                    continue
                if isinstance(error, BatchTimeout):
                    raise
                _log.warning("a loader cannot take a batch yet: %s", error)
                looking.wait(AGAIN_S)

    def _give_back(self) -> None:
        """Release what was not given out."""
        while True:
            try:
                given = self._ready.get_nowait()
            except Empty:
                break
            if isinstance(given, Given):
                _release(given.lease)
        self._ready.put(None)  # for whoever waits at this moment


def _release(lease: Lease) -> None:
    """Release a lease, or leave that to the consumer's thread when Redis is away."""
    try:
        lease.release()
    except LeaseLost as error:
        _log.warning("a batch that was taken ahead was lost: %s", error)
    except StoreError as error:
        _log.warning("a batch that was taken ahead goes back later: %s", error)
        lease.abandon()


_running: weakref.WeakSet[Ahead] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """Give back what loops hold that were not closed."""
    for ahead in list(_running):
        ahead.close(EXIT_S)
