"""Where a trainer's loop gets fresh batches: prepared beside the step, until it is asked to end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from redrb.errors import RecordError, WrongStep
from redrb.experience import Experience
from redrb.runtime.stopping import StopRequest
from redrb.stream import Lease
from redrb.stream.feeding import ExperienceLoader

_log = logging.getLogger("redrb")


class FreshBatches:
    """Takes so many batches, and stops waiting for one when the loop is to end.

    Attributes:
        wait_for_batch_s: Seconds that the loop has waited for batches.
    """

    def __init__(
        self,
        make_loader: Callable[[int, int | None], ExperienceLoader],
        stop: StopRequest,
        *,
        batches: int | None,
        on_misfits: Callable[[RecordError], None] = lambda _: None,
        jump: Callable[[int], None] | None = None,
    ) -> None:
        """Describe the batches.

        Args:
            make_loader: Makes a loader of what is left, given the batches taken before and how many
                more will be; it does not acknowledge by itself.
            stop: Asks for the end.
            batches: Fresh batches that will be asked for; None: nobody knows.
            on_misfits: Told of groups that fit into no batch.
            jump: Told from which step on ranks may take, where the first ones are done already;
                None: that is an error.
        """
        self._make_loader = make_loader
        self._stop = stop
        self._on_misfits = on_misfits
        self._jump = jump
        self._left = batches
        self._taken = 0
        self._loader: ExperienceLoader | None = None
        self._batches: Iterator[Experience] = iter(())
        self._waited_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    @property
    def wait_for_batch_s(self) -> float:
        """Seconds that the loop has waited for batches."""
        return self._waited_s + (self._loader.wait_for_batch_s if self._loader else 0.0)

    def next(self) -> tuple[Experience, Lease] | None:
        """Return the next batch and its lease, None when the loop was asked to end meanwhile.

        Samples that fit into no batch are among the dead letters then, and the others went back.

        Raises:
            BatchTimeout: No full batch came in time.
        """
        while not self._stop:
            loader = self._loader = self._loader or self._begin()
            with self._stop.waking(loader.stop):
                try:
                    batch = None if self._stop else next(self._batches, None)
                except RecordError as error:
                    if not error.ids:
                        raise
                    _log.error("groups %s fit into no batch: %s", list(error.ids), error)
                    self._close()
                    self._on_misfits(error)
                    continue
                except WrongStep as error:
                    if self._jump is None or self._taken:
                        raise
                    self._close()
                    self._jump(error.next_step)
                    continue
            if batch is not None and loader.lease is not None:
                self._taken += 1
                self._left = None if self._left is None else self._left - 1
                return batch, loader.lease
        return None

    def _begin(self) -> ExperienceLoader:
        loader = self._make_loader(self._taken, self._left)
        self._batches = iter(loader)
        return loader

    def _close(self) -> None:
        loader, self._loader = self._loader, None
        if loader is not None:
            self._waited_s += loader.wait_for_batch_s
            loader.close()
