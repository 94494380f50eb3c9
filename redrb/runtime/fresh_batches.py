"""Fresh batches for the training loop: prefetched while a step runs, until the loop is to end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Self

from redrb.connection.deadline import Deadline
from redrb.connection.stop import Stop
from redrb.errors import RecordError, WrongStep
from redrb.experience import Experience
from redrb.runtime.trainer_settings import BatchSettings
from redrb.stream import ExperienceStream, Lease
from redrb.stream.feeding import ExperienceLoader

_log = logging.getLogger("redrb")


class FitEnded(Exception):
    """Raised where a batch is asked for after the loop was asked to end."""


class FreshBatches:
    """Takes a number of batches from a stream, without acknowledging them.

    Attributes:
        wait_for_batch_s: Seconds that the loop has waited for batches.
    """

    def __init__(
        self,
        stream: ExperienceStream,
        batch_size: int,
        settings: BatchSettings,
        stop: Stop,
        *,
        in_step: bool,
        batches: int | None,
        first_step: int,
        may_skip_steps: bool,
        on_misfits: Callable[[RecordError], None],
    ) -> None:
        """Describe the batches; none is taken yet.

        Args:
            stream: Stream of the trainer's buffer.
            batch_size: Samples in a batch, over all ranks.
            settings: How batches are taken and placed.
            stop: Ends the wait for a batch.
            in_step: Whether ranks end at the same step: one that is asked to end still takes its
                next batch, as long as it has time for Redis.
            batches: Number of batches; None: no limit.
            first_step: Step of the first batch, where ranks share the stream.
            may_skip_steps: Whether to go on at the ranks' next step where `first_step` was already
                trained; otherwise that is an error.
            on_misfits: Called with the error when groups do not fit into one batch.
        """
        self._stream = stream
        self._batch_size = batch_size
        self._settings = settings
        self._stop, self._in_step = stop, in_step
        self._left = batches
        self._first_step = first_step
        self._may_skip_steps = may_skip_steps
        self._on_misfits = on_misfits
        self._taken = 0
        self._unclaimed: list[Lease] = []
        self._loader: ExperienceLoader | None = None
        self._batches: Iterator[Experience] = iter(())
        self._waited_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_loader()
        for lease in self.leases():  # the loop has ended before their step
            lease.abandon()

    @property
    def wait_for_batch_s(self) -> float:
        """Seconds that the loop has waited for batches."""
        return self._waited_s + (self._loader.wait_for_batch_s if self._loader else 0.0)

    def leases(self) -> list[Lease]:
        """Return the leases of the batches that were taken since the last call."""
        leases, self._unclaimed = self._unclaimed, []
        return leases

    def next(self) -> Experience:
        """Return the next batch; its lease is among the next `leases`.

        When samples do not fit into one batch, the misfits go to the dead letters, the others are
        requeued, and another batch is taken.

        Raises:
            FitEnded: The loop is to end.
            BatchTimeout: No full batch came in time.
        """
        while self._in_step or not self._stop:
            loader = self._loader = self._loader or self._open_loader()
            with self._ending(loader.stop):
                try:
                    ends = self._stop and not self._in_step
                    batch = None if ends else next(self._batches, None)
                except RecordError as error:
                    if not error.ids:
                        raise
                    _log.error("groups %s do not fit into a batch: %s", list(error.ids), error)
                    self._close_loader()
                    self._on_misfits(error)
                    continue
                except WrongStep as error:
                    if not self._may_skip_steps or self._taken:
                        raise
                    self._close_loader()
                    self._first_step = error.next_step
                    continue
            if batch is not None and loader.lease is not None:
                self._taken += 1
                self._left = None if self._left is None else self._left - 1
                self._unclaimed.append(loader.lease)
                return batch
            if not self._stop.left_s:
                break
            if self._left is not None and self._left <= 0:  # a step took several batches
                self._close_loader()
                self._left = 1
        raise FitEnded

    @contextmanager
    def _ending(self, end: Callable[[], None]) -> Iterator[None]:
        """In this block call `end` when the loop is to end, or its time for Redis is up."""
        self._stop.interrupts.add(end)
        try:
            with Deadline(), nullcontext() if self._in_step else self._stop.waking(end):
                yield
        finally:
            self._stop.interrupts.discard(end)

    def _open_loader(self) -> ExperienceLoader:
        loader = ExperienceLoader(
            self._stream,
            self._batch_size,
            steps=self._left,
            acknowledge=False,
            **self._settings.loader_options(self._first_step + self._taken),
        )
        self._batches = iter(loader)
        return loader

    def _close_loader(self) -> None:
        loader, self._loader = self._loader, None
        if loader is not None:
            self._waited_s += loader.wait_for_batch_s
            loader.close()
