"""`ReadAhead`: a thread that takes batches while others are trained on."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue
from typing import Generic, Literal, TypeVar

from redrb import forks
from redrb.connection.deadline import Deadline
from redrb.connection.outage import Outage
from redrb.connection.retries import again, insist
from redrb.connection.stop import Stop
from redrb.errors import BatchTimeout, ConfigError, StoreUnavailable
from redrb.lua.pages import PAGES
from redrb.stream.take.hand_back import hand_back
from redrb.stream.take.lease import Lease

T = TypeVar("T")

JOIN_S = 30.0
"""How long `close` waits for the thread: longer than the silence after which a server is away."""

SOON_S = 0.01
"""How long an acknowledgement waits for a take that is under way, to go with the next one."""

_log = logging.getLogger("redrb")


class ReadAhead(Generic[T]):
    """Batches that are taken ahead by a thread, in order, and prepared for their reader.

    A batch that the reader is done with is acknowledged in the request that takes a further one; it
    is acknowledged alone where the thread waits for groups, or has ended. The thread holds no
    reference to the reader, so that a loop that is dropped ends the thread: `stop` may be called
    from anywhere, also while garbage is collected. The thread then releases the batches that were
    not read.

    Attributes:
        handed: Lease of the batch that was read last; None before.
    """

    def __init__(
        self,
        take: Callable[[int, Lease | None], Lease],
        is_fresh: Callable[[Lease], bool],
        prepare: Callable[[Lease], T],
        *,
        prefetch: int,
        timeout: float | None,
        steps: int | None = None,
        nudge: Callable[[], None] | None = None,
    ) -> None:
        """Start the thread, if batches are taken ahead.

        Args:
            take: Takes the batch of a number, from 0 on, and acknowledges another lease before; it
                waits for as long as its block, or until that is asked to stop.
            is_fresh: Returns whether a batch may be handed over; otherwise its lease is over, and
                another batch is taken in its place. It may raise StoreUnavailable.
            prepare: Makes what the reader gets of a batch; after an error the lease ends as in
                `with lease`.
            prefetch: Most batches that are taken and not read; 0: a batch is taken when it is read,
                in the reader's thread.
            timeout: Seconds that the reader waits for a batch, before a last look that may take
                one more.
            steps: Batches in all; None: any number.
            nudge: Wakes the heartbeat thread, which then releases the batch that was read last if
                `stop` is called before it was ended; otherwise `next` acknowledges it. None: the
                reader ends its leases.
        """
        self._take, self._is_fresh, self._prepare = take, is_fresh, prepare
        self._timeout, self._steps = timeout, steps
        self._nudge = nudge
        self.handed: Lease | None = None
        self._owner = forks.process
        self._stopped = self._ended = False
        self._permitted_count = prefetch
        self._prepared_count = self._read_count = 0
        self._returned_count = 0  # batches that were read, and were too stale to be handed over
        self._overdue = -1  # number of the batch whose time is up
        self._stop_take = Stop()  # of the take that is under way
        self._stop_check = Stop()
        self._untaken = Outage("a batch cannot be taken ahead yet")
        self._unchecked = Outage("the staleness of a batch cannot be checked yet")
        # a permit for a take, with the lease to acknowledge in it; False: stop
        self._permits: SimpleQueue[Lease | Literal[False] | None] = SimpleQueue()
        self._ready: SimpleQueue[tuple[Lease, T] | BaseException | None] = SimpleQueue()
        for _ in range(prefetch):
            self._permits.put(None)
        self._thread: threading.Thread | None = None
        if prefetch:
            self._thread = threading.Thread(target=self._run, name="redrb-read-ahead", daemon=True)
            self._thread.start()

    @property
    def is_copy(self) -> bool:
        """Whether this is a forked process's copy, without the thread."""
        return self._owner is not forks.process

    @property
    def ready(self) -> int:
        """Batches that are ready and were not read."""
        read = self._read_count + self._returned_count
        return 0 if self._stopped or self._ended else self._prepared_count - read

    def next(self) -> tuple[Lease, T] | None:
        """Return the next batch, and what was prepared of it; None after `stop` and the last one.

        Raises:
            BatchTimeout: It did not come in time.
            StoreUnavailable: Redis stayed away until then.
            LeaseLost: The batch that was read before, or the one before that, was lost.
            ConfigError: In a forked process: the thread is its parent's.
            RedrbError: The thread could not take or prepare a batch.
        """
        if self.is_copy:
            raise ConfigError(
                "this loop was begun before the process forked: begin another loop in the child."
            )
        self._ended = self._ended or self._read_count == self._steps
        if self._stopped or self._ended:
            return None
        done = self.handed if self._nudge and self.handed else None
        deadline = Deadline(self._timeout)
        if self._thread is None:
            batch = self._taken_now(done, deadline)
        else:
            batch = self._read_with(done, deadline)
            while batch is not None and not self._may_go(batch[0], deadline):
                self._returned_count += 1
                self._permits.put(None)
                self._permitted_count += 1
                batch = self._read(deadline)
        if batch is not None:
            self._read_count += 1
            self.handed = batch[0]
        return batch

    def _taken_now(self, done: Lease | None, deadline: Deadline) -> tuple[Lease, T] | None:
        try:
            return self._taken(self._read_count, done, deadline)
        except BaseException as error:
            self._ended = True
            if self._stopped and isinstance(error, BatchTimeout | StoreUnavailable):
                return None
            raise

    def _read_with(self, done: Lease | None, deadline: Deadline) -> tuple[Lease, T] | None:
        """Return the next batch, and let another one be acknowledged."""
        found = None
        if done is not None and len(done) <= PAGES["ended"]:  # more take several requests
            with suppress(Empty):
                found = self._ready.get(timeout=SOON_S)
        if done is not None and not (isinstance(found, tuple) and self._is_idle):
            done.ack()
            done = None
        self._permits.put(done)
        self._permitted_count += 1
        return self._read(deadline) if found is None else self._checked(found)

    @property
    def _is_idle(self) -> bool:
        """Whether the thread has no permit, so that it takes as soon as it gets one."""
        return self._prepared_count == self._permitted_count

    def _read(self, deadline: Deadline) -> tuple[Lease, T] | None:
        """Wait until a batch is ready; None after `stop`."""
        try:
            found = self._ready.get(timeout=min(deadline.waits_s, threading.TIMEOUT_MAX))
        except Empty:
            self._overdue = self._read_count + self._returned_count
            self._stop_take.ask()
            found = self._ready.get()
        return self._checked(found)

    def _checked(self, found: tuple[Lease, T] | BaseException | None) -> tuple[Lease, T] | None:
        if isinstance(found, tuple):
            return found
        self._ended = True
        if found is not None:
            try:
                raise found
            finally:
                del found  # it references this frame
        return None

    def _may_go(self, lease: Lease, deadline: Deadline) -> bool:
        """Return whether a batch is fresh enough to be handed over, however long Redis is away."""

        def look() -> bool:
            left_s = deadline.waits_s
            with Deadline(None if left_s == math.inf else left_s, stop=self._stop_check):
                return self._is_fresh(lease)

        try:
            fresh = insist(
                look,
                self._stop_check,
                self._unchecked.failed,
                over=lambda: deadline.over,
                once_more=True,
            )
        except StoreUnavailable:
            lease.abandon()
            if self._stopped:
                return False
            self._ended = True
            raise
        self._unchecked.over()
        return fresh

    def stop(self, *, requeue: bool = True) -> None:
        """Let the thread end; never blocks.

        Args:
            requeue: Whether the heartbeat thread releases the batch that was read last.
        """
        if self.is_copy:
            return
        self._stopped = True
        self._stop_take.ask()
        self._stop_check.ask()
        self._permits.put(False)
        self._ready.put(None)  # for a reader that waits: the thread may stand in a request
        if requeue and self._nudge and self.handed:
            self.handed.abandon()
            self._nudge()

    def close(self, *, requeue: bool = True) -> None:
        """Let the thread end, and wait until the batches that were not read are released."""
        self.stop(requeue=requeue)
        if self._thread is not None and not self.is_copy:
            # half of a process's time to end is left for other requests
            with Deadline(at_most=2 * JOIN_S) as deadline:
                self._thread.join(deadline.left_s / 2)
            if self._thread.is_alive():
                _log.warning("a thread that takes ahead waits for Redis: it ends when that answers")

    def _run(self) -> None:
        try:
            self._take_all()
            end: BaseException | None = None
        except BaseException as error:  # noqa: BLE001 (it is raised where batches are read)
            end = error
        self._ready.put(None if self._stopped else end)
        del end
        while not self._stopped:  # batches stay ready until the loop is over
            self._permits.get()
        with Deadline(stop=self._stop_take, silence_s=self._silence_s):
            self._release_unread()

    def _take_all(self) -> None:
        number = 0
        while (done := self._permits.get()) is not False:
            if self._steps is not None and number >= self._steps + self._returned_count:
                continue  # all are taken; another one is taken only for one that was too stale
            try:
                batch = self._taken(number, done, Deadline())
            except BaseException:
                if done:  # the error, which refers to it, may be kept
                    done.abandon()
                raise
            self._prepared_count += 1
            self._ready.put(batch)
            del batch, done  # the reader holds the only references
            number += 1

    def _taken(self, number: int, done: Lease | None, deadline: Deadline) -> tuple[Lease, T]:
        """Take a batch, however long Redis is away, and prepare it."""
        lease = self._leased(number, done, deadline)
        with ExitStack() as scope:
            scope.push(lease)  # if decoding fails, the lease ends as in `with lease`
            batch = (lease, self._prepare(lease))
            scope.pop_all()
        return batch

    @property
    def _silence_s(self) -> float:
        """Seconds after which a silent connection is broken: the reader must get its error."""
        return math.inf if self._timeout is None else self._timeout / 3

    def _leased(self, number: int, done: Lease | None, deadline: Deadline) -> Lease:
        def over() -> bool:
            return self._stopped or self._overdue == number or deadline.over

        def take() -> Lease:
            stop = self._stop_take = Stop()
            if self._stopped or self._overdue == number:  # asked before this `Stop` was made
                stop.ask()
            left_s = deadline.waits_s
            timeout = None if left_s == math.inf else left_s
            with Deadline(timeout, stop=stop, silence_s=self._silence_s):
                return self._take(number, done or None)

        def passes(error: BaseException) -> bool:  # a stop was meant for the batch before
            is_stopped = isinstance(error, BatchTimeout) and bool(self._stop_take)
            return is_stopped or isinstance(error, StoreUnavailable)

        def note(error: Exception) -> None:
            if not self._stop_take:
                self._untaken.failed(error)

        failed: list[Exception] = []
        try:
            lease = take()
        except (BatchTimeout, StoreUnavailable) as error:
            failed.append(error)
        if failed:
            lease = again(
                take,
                failed,
                passes=passes,
                over=over,
                note=note,
                pause=lambda seconds: self._stop_take.wait(seconds),
            )
        self._untaken.over()
        return lease

    def _release_unread(self) -> None:
        while True:
            try:
                found = self._ready.get_nowait()
            except Empty:
                break
            if isinstance(found, tuple):
                hand_back(found[0])
        self._ready.put(None)  # for a reader that waits at this moment
