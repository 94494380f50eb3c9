"""`Prefetcher`: a thread that takes, decodes and places batches while others are trained on."""

from __future__ import annotations

import atexit
import logging
import math
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch

from redrb.connection.deadline import Deadline
from redrb.connection.outage import Outage
from redrb.connection.retries import again, insist
from redrb.connection.stop import Stop
from redrb.errors import BatchTimeout, ConfigError, LeaseLost, StoreError, StoreUnavailable
from redrb.experience import Experience
from redrb.experience.padding import check_side
from redrb.experience.records import Side, named_tensors
from redrb.forks import mark
from redrb.stream import Lease


@dataclass(frozen=True, slots=True)
class PlacedBatch:
    """A batch on its device, or on its way there.

    Attributes:
        lease: Its lease.
        batch: The batch; copies of its tensors may still be under way.
        copied: Event on the device that marks the end of the copies; None: there are none.
    """

    lease: Lease
    batch: Experience
    copied: torch.cuda.Event | None = None

    def ready(self) -> Experience:
        """Return the batch, for work that is queued on the current stream from now on.

        The CPU does not wait. The memory belongs to the stream of the copies; `record_stream`
        keeps the allocator from giving it to the next copy too early.
        """
        if self.copied is not None:
            tensors = list(named_tensors(self.batch).values())
            stream = torch.cuda.current_stream(tensors[0].device)
            stream.wait_event(self.copied)
            for tensor in tensors:
                tensor.record_stream(stream)
        return self.batch


class Placer:
    """Pads the groups of a lease into a batch and puts it on a device; belongs to one thread."""

    def __init__(self, device: str | torch.device, side: Side, *, pin_memory: bool) -> None:
        """Choose the device; raises ConfigError if there is no such device."""
        try:
            self._device = torch.device(device)
            # each thread has a current device: the one of this thread counts
            self._cuda = _cuda_device(self._device, pin_memory=pin_memory)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"device={device!r}: {str(error).splitlines()[0]}") from error
        self._side = check_side(side)
        self._pin_memory = pin_memory  # from other memory a copy waits for other work
        self._stream: torch.cuda.Stream | None = None

    def place(self, lease: Lease) -> PlacedBatch:
        """Return the batch of a lease."""
        if self._device.type == "cuda" and self._cuda is not None:
            return self._copied(lease, self._cuda)
        batch = lease.batch(self._device, side=self._side, pin_memory=self._pin_memory)
        if self._pin_memory and self._device.type == "cpu":
            with torch.cuda.device(self._cuda) if self._cuda is not None else nullcontext():
                batch.pin_memory()
        return PlacedBatch(lease, batch)

    def _copied(self, lease: Lease, device: torch.device) -> PlacedBatch:
        """Copy on a separate CUDA stream, so that the copy waits for no training step."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            batch = lease.batch(device, side=self._side, pin_memory=self._pin_memory)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        return PlacedBatch(lease, batch, copied)


def _cuda_device(device: torch.device, *, pin_memory: bool) -> torch.device | None:
    """Return the GPU for copies or for pinned memory; None without one."""
    if device.type == "cuda" and device.index is not None:
        return device
    if device.type == "cuda" or (pin_memory and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return None


_log = logging.getLogger("redrb")
JOIN_S = 30.0
"""How long `close` waits for the thread: longer than the silence after which a server is away."""

EXIT_S = 3.0
"""How long the end of the process waits for the thread."""


class Prefetcher:
    """Batches that one thread takes ahead, in order.

    The thread holds no reference to the reader of the batches, so that a loop that is dropped ends
    the thread: `stop` may be called from anywhere, also while garbage is collected. The thread then
    releases the batches that were not read.
    """

    def __init__(
        self,
        take: Callable[[int], Lease],
        is_fresh: Callable[[Lease], bool],
        placer: Placer,
        *,
        prefetch: int,
        steps: int | None,
    ) -> None:
        """Start the thread.

        Args:
            take: Takes the batch of a number, from 0 on; it waits for ever, or until the thread is
                asked to stop.
            is_fresh: Returns whether a batch may be handed over; otherwise its lease is over, and
                another batch is taken in its place. It may raise StoreUnavailable.
            prefetch: Most batches that are taken and not read; 0: a batch is taken when it is read.
        """
        self._take = take
        self._is_fresh = is_fresh
        self._placer = placer
        self._steps = steps
        self._on_demand = prefetch == 0
        self._owner = mark()
        self._stopped = False
        self._ended = False
        self._placed_count = self._read_count = 0
        self._returned_count = 0  # batches that were read, and were too stale to be handed over
        self._overdue = -1  # number of the batch whose time is up
        self._stop_take = Stop()  # of the take that is under way
        self._stop_check = Stop()
        self._untaken = Outage("a loader cannot take a batch yet")
        self._unchecked = Outage("a loader cannot check the staleness of a batch yet")
        self._permits: SimpleQueue[bool] = SimpleQueue()
        self._ready: SimpleQueue[PlacedBatch | BaseException | None] = SimpleQueue()
        for _ in range(prefetch):
            self._permits.put(True)
        self._thread = threading.Thread(target=self._run, name="redrb-loader", daemon=True)
        _running.add(self)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether no more batches come."""
        return self._stopped or self._ended

    @property
    def ready(self) -> int:
        """Batches that could be read now."""
        return 0 if self.over else self._placed_count - self._read_count - self._returned_count

    def next(self, timeout: float | None) -> PlacedBatch | None:
        """Return the next batch as soon as it is ready; None at the end, and after `stop`.

        When `timeout` is over the thread looks a last time, and takes a batch that is there. Redis
        may be away as long as a batch is waited for. Batches that have become too stale are
        passed over.

        Raises:
            BatchTimeout: No batch came in time, and no more will come.
            StoreUnavailable: Redis was away when the time was up, and no more batches will come.
            ConfigError: The process was forked since the thread was started.
            BaseException: An error of the thread, after the batches before it; no more will come.
        """
        if self._owner is not mark():
            raise ConfigError(
                "this loop was begun before the process forked: begin another loop in the child."
            )
        if self._read_count == self._steps:
            self._ended = True
        if self.over:
            return None
        if self._on_demand:
            self._permits.put(True)
        deadline = Deadline(timeout)
        while (batch := self._read(deadline)) is not None and not self._may_go(
            batch.lease, deadline
        ):
            self._returned_count += 1
            self._permits.put(True)
        if batch is not None:
            self._read_count += 1
            if not self._on_demand:
                self._permits.put(True)
        return batch

    def _read(self, deadline: Deadline) -> PlacedBatch | None:
        """Wait until a batch is placed; None after `stop`."""
        try:
            batch = self._ready.get(timeout=min(deadline.waits_s, threading.TIMEOUT_MAX))
        except Empty:
            self._overdue = self._read_count + self._returned_count
            self._stop_take.ask()
            batch = self._ready.get()
        self._ended = not isinstance(batch, PlacedBatch)
        if isinstance(batch, BaseException):
            try:
                raise batch
            finally:
                del batch  # it references this frame
        return batch

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

    def stop(self) -> None:
        """Let the thread end; never blocks."""
        if self._owner is mark():
            self._stopped = True
            self._stop_take.ask()
            self._stop_check.ask()
            self._permits.put(False)
            self._ready.put(None)  # for a reader that waits: the thread may stand in a request

    def close(self, timeout: float = JOIN_S) -> None:
        """Let the thread end, and wait until the batches that were not read are released."""
        self.stop()
        if self._owner is mark() and threading.current_thread() is not self._thread:
            _running.discard(self)
            # half of a process's time to end is left for other requests
            with Deadline(at_most=2 * timeout) as deadline:
                self._thread.join(deadline.left_s / 2)
            if self._thread.is_alive():
                _log.warning("a loader's thread still waits for Redis: it ends when Redis answers")

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
        with Deadline(stop=self._stop_take):
            self._release_unread()

    def _take_all(self) -> None:
        number = 0
        while self._permits.get():
            if self._steps is not None and number >= self._steps + self._returned_count:
                continue  # all are taken; another one is taken only for one that was too stale
            lease = self._taken(number)
            with ExitStack() as scope:
                scope.push(lease)  # if decoding fails, the lease ends as in `with lease`
                batch = self._placer.place(lease)
                scope.pop_all()
            self._ready.put(batch)
            self._placed_count += 1
            del batch, lease  # the reader holds the only references
            number += 1

    def _taken(self, number: int) -> Lease:
        """Take a batch, however long it takes, and however long Redis is away."""

        def over() -> bool:
            return self._stopped or self._overdue == number

        def take() -> Lease:
            stop = self._stop_take = Stop()
            if over():  # asked before this `Stop` was made
                stop.ask()
            with Deadline(stop=stop):
                return self._take(number)

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
                batch = self._ready.get_nowait()
            except Empty:
                break
            if isinstance(batch, PlacedBatch):
                _release(batch.lease)
        self._ready.put(None)  # for a reader that waits at this moment


def _release(lease: Lease) -> None:
    """Release a lease, or leave that to the heartbeat thread when Redis is away."""
    try:
        lease.release()
    except LeaseLost as error:
        _log.warning("a batch that was taken ahead was lost: %s", error)
    except StoreError as error:
        _log.warning("a batch that was taken ahead is requeued later: %s", error)
        lease.abandon()


_running: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """Release the batches of loops that were not closed."""
    for prefetcher in list(_running):
        prefetcher.close(EXIT_S)
