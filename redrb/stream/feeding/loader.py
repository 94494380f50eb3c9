"""`ExperienceLoader`: batches that are ready when the step ends."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Self

import torch

from redrb.checks import checked_int, checked_int_or_none
from redrb.connection.deadline import checked_timeout
from redrb.errors import ConfigError, LeaseLost
from redrb.experience import Experience, Status
from redrb.experience.records import Side
from redrb.forks import in_child
from redrb.scopes import Entered
from redrb.stream import ExperienceStream, Lease
from redrb.stream.arguments import AnyStatus, checked_least, checked_status
from redrb.stream.closing import takes_ahead
from redrb.stream.feeding.placing import PlacedBatch, Placer
from redrb.stream.take.read_ahead import ReadAhead


class ExperienceLoader(Entered):
    """Yields padded batches; the next ones are taken, decoded and copied while the step runs.

    A batch is acknowledged when the loop comes back for the next one, which is after its step.
    Other batches are requeued unharmed: prefetched batches as soon as the loop is over, the last
    batch by `close`, unless it was ended (`loader.lease.ack()`). Left by an exception, a `with`
    block counts a failed delivery of the last batch only.

    It holds up to `prefetch` + 1 batches. In a task with `max_staleness` or `max_token_staleness`
    each batch is checked again when the loop gets it: batches that have become too stale are
    returned, and the next one that is within the bound comes instead. Otherwise a batch may be
    `prefetch` steps staler than one that is taken when it is needed. Belongs to one thread; a
    second loop ends the first.

    Attributes:
        lease: Lease of the batch that was given last; None before.
        wait_for_batch_s: Seconds that loops have waited for batches.
        last_wait_for_batch_s: Seconds that they waited for the last one.
        batches: Batches that were given.

    Examples:
        >>> with ExperienceLoader(stream, 32, device="cuda", pin_memory=True, steps=1000) as loader:
        ...     for batch in loader:
        ...         train(batch)
    """

    def __init__(
        self,
        stream: ExperienceStream,
        batch_size: int,
        *,
        prefetch: int = 2,
        steps: int | None = None,
        device: str | torch.device = "cpu",
        pin_memory: bool = False,
        side: Side = "left",
        tensors: Collection[str] | None = None,
        timeout: float | None = None,
        at_least: int | None = None,
        status: AnyStatus = Status.COMPLETED,
        where: Mapping[str, Any] | None = None,
        acknowledge: bool = True,
        first_step: int = 0,
        **take: Any,
    ) -> None:
        """Describe the batches; a thread takes them from the first `for` on.

        Args:
            stream: The stream; close it after the loader.
            batch_size: Groups in a batch.
            prefetch: Most batches that are taken ahead; 0: each is taken when the loop asks for it.
            steps: Batches of a loop; None: it goes on until a batch does not come in time.
            device: Device of the batches.
            pin_memory: Decode into pinned memory: copies to the device then go on beside the step.
            side: Where padding goes.
            tensors: Names of the tensors that are wanted, as for `Lease.batch`; None: all.
            timeout: Seconds that the loop waits for a batch, before a last look that may take one
                more; None waits for ever, and logs the shortage every half minute.
            at_least, status, where: As for `stream.take`.
            acknowledge: Whether the loop acknowledges batches. Otherwise the caller keeps each
                `loader.lease` and ends it, for instance after a checkpoint.
            first_step: `step` of the first batch, where `rank` is given: it counts up by one a
                batch, from loop to loop.
            take: Further keywords of `stream.take`, such as `rank` and `world_size`.

        Raises:
            ConfigError: An argument cannot be used.
        """
        if not isinstance(stream, ExperienceStream):
            raise ConfigError(f"a {type(stream).__name__} is no redrb.ExperienceStream.")
        self._stream = stream
        self._batch_size, least = checked_least(batch_size, at_least)
        self._prefetch = checked_int("prefetch", prefetch)
        self._steps = checked_int_or_none("steps", steps, 0)
        self._timeout = checked_timeout(timeout)
        self._placer = Placer(device, side, pin_memory=pin_memory, tensors=tensors)
        self._acknowledge = acknowledge
        self._step = checked_int("first_step", first_step)
        status = checked_status(status)
        self._keywords = {**take, "at_least": least, "status": status, "where": where}
        self._ahead: ReadAhead[PlacedBatch] | None = None
        self.lease: Lease | None = None
        in_child(self._forget_lease)
        self.wait_for_batch_s = self.last_wait_for_batch_s = 0.0
        self.batches = 0

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            lease = self._unended_lease()
            if error is not None and lease is not None:
                lease.__exit__(kind, error, trace)
        finally:
            self.close()

    def __iter__(self) -> Iterator[Experience]:
        """Begin a loop; it ends the loop that is under way."""
        ahead = self._begin()
        return _Loop(partial(self._next, ahead), ahead)

    @property
    def ready(self) -> int:
        """Batches that are ready and were not given yet."""
        return 0 if self._ahead is None else self._ahead.ready

    def stop(self) -> None:
        """Let the loop that is under way end at once, as if there were no more batches.

        Never blocks and may be called from anywhere, such as from a signal's handler.
        """
        ahead = self._ahead
        if ahead is not None:
            ahead.stop()

    def close(self) -> None:
        """End the loop that is under way and its thread, and requeue batches that were not ended.

        With `acknowledge=False` the caller ends the leases of batches that were given.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()
            self._stream.worker.steps.end()
        lease = self._unended_lease()
        if lease is not None:
            with suppress(LeaseLost):  # another consumer has taken it over
                lease.release()

    def _begin(self) -> ReadAhead[PlacedBatch]:
        self.close()
        stream, count, keywords, first = self._stream, self._batch_size, self._keywords, self._step

        def take(number: int, _: Lease | None) -> Lease:
            step = None if keywords.get("rank") is None else first + number
            with stream.worker.steps.ahead():
                return stream.take(count, **keywords, step=step)

        ahead = self._ahead = ReadAhead(
            take,
            stream.is_fresh,
            self._placer.place,
            prefetch=self._prefetch,
            steps=self._steps,
            timeout=self._timeout,
        )
        takes_ahead(stream, ahead)
        return ahead

    def _next(self, ahead: ReadAhead[PlacedBatch]) -> Experience | None:
        """Acknowledge the batch before, and return the next one; None at the end."""
        if self._ahead is not ahead:
            return None
        lease = self._unended_lease()
        if lease is not None:
            lease.ack()
        began = time.monotonic()
        self._stream.worker.steps.end()
        try:
            batch = ahead.next()
        finally:
            self.last_wait_for_batch_s = time.monotonic() - began
            self.wait_for_batch_s += self.last_wait_for_batch_s
        if batch is None:
            return None
        self.lease, placed = batch
        self.batches += 1
        self._step += 1
        self._stream.worker.steps.begin()
        return placed.ready()

    def _unended_lease(self) -> Lease | None:
        """Return the lease of the last batch if this object ends it."""
        return self.lease if self._acknowledge and self.lease else None

    def _forget_lease(self) -> None:
        """In a forked child: the lease is the parent's."""
        self.lease = None


class _Loop:
    """One loop over a loader; its batches are requeued when the loop is dropped."""

    def __init__(
        self, take: Callable[[], Experience | None], ahead: ReadAhead[PlacedBatch]
    ) -> None:
        self._take = take
        self._ahead = ahead
        self._finalizer = weakref.finalize(self, ahead.stop)
        self._finalizer.atexit = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Experience:
        batch = None
        try:
            batch = self._take()
        finally:
            if batch is None:  # the end, or an exception
                self._ahead.stop()
        if batch is None:
            raise StopIteration
        return batch
