"""Fresh batches for the training loop, and groups that cannot be trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from redrb.codec import GroupLayout
from redrb.connection.deadline import Deadline
from redrb.connection.stop import Stop
from redrb.errors import ConfigError, LeaseLost, RecordError
from redrb.experience import Experience
from redrb.stream import ExperienceStream, Lease
from redrb.stream.feeding import ExperienceLoader
from redrb.train.callbacks import TrainerCallback
from redrb.train.world import world_size_here
from redrb.words import agreeing

Acknowledge: TypeAlias = Literal["step", "checkpoint"]
"""When a trained batch is acknowledged: after its step, or after the checkpoint that holds it."""

_log = logging.getLogger("redrb")


class FitEnded(Exception):
    """Raised where a batch is asked for after the loop was asked to end, or outside of `fit`."""


@dataclass(kw_only=True)
class FreshBatches:
    """Takes the batches of a trainer, in blocks of `taking`, without acknowledging them.

    Attributes:
        stream: The stream that they are taken from.
        size: Groups in a batch; of several ranks in the batches of all.
        stop: Asks for the end of the loop.
        is_taking: Whether a block of `taking` is under way.

    Raises:
        ConfigError: Only one of `rank` and `world_size` is given.
    """

    stream: ExperienceStream
    size: int
    stop: Stop
    callbacks: TrainerCallback
    ack: Acknowledge
    device: torch.device
    pin_memory: bool
    prefetch: int
    timeout: float | None
    rank: int | None
    world_size: int | None
    is_taking: bool = False
    _left: int | None = None  # batches that are still to come; None: no limit
    _first_step: int = 0
    _taken: int = 0
    _together: bool = False  # ranks take their batches at the same time
    _unclaimed: list[Lease] = field(default_factory=list)
    _loader: ExperienceLoader | None = None
    _batches: Iterator[Experience] = field(default_factory=lambda: iter(()))
    _waited_s: float = 0.0

    def __post_init__(self) -> None:
        if (self.rank is None) != (self.world_size is None):
            raise ConfigError("give rank and world_size, both or none.")

    @contextmanager
    def taking(self, batches: int | None, first_step: int) -> Iterator[None]:
        """In this block `next` returns batches; those that no step got are requeued after it."""
        self._left, self._first_step, self._taken = batches, first_step, 0
        self.is_taking, self._together = True, world_size_here() > 1
        try:
            yield
        finally:
            self.is_taking = False
            self._close_loader()
            for lease in self.leases():  # the loop has ended before their step
                lease.abandon()

    @property
    def wait_for_batch_s(self) -> float:
        """Seconds of waiting for batches, in all blocks."""
        return self._waited_s + (self._loader.wait_for_batch_s if self._loader else 0.0)

    def leases(self) -> list[Lease]:
        """Return the leases of the batches that were taken since the last call."""
        leases, self._unclaimed = self._unclaimed, []
        return leases

    def next(self) -> Experience:
        """Return the next batch, whose lease is among the next `leases`; FitEnded: there is none.

        When samples do not fit into one batch, the misfits go to the dead letters, the others are
        requeued, and another batch is taken.
        """
        while self.is_taking and (self._together or not self.stop):
            loader = self._loader = self._loader or self._open_loader()
            with self._ending(loader.stop):
                try:
                    ends = self.stop and not self._together
                    batch = None if ends else next(self._batches, None)
                except RecordError as error:
                    if not error.ids:
                        raise
                    _log.error("groups %s do not fit into a batch: %s", list(error.ids), error)
                    self._close_loader()
                    self.callbacks.on_misfits(error)
                    continue
            if batch is not None and loader.lease is not None:
                self._taken += 1
                self._left = None if self._left is None else self._left - 1
                self._unclaimed.append(loader.lease)
                return batch
            if not self.stop.left_s:
                break
            if self._left is not None and self._left <= 0:  # a step took several batches
                self._close_loader()
                self._left = 1
        raise FitEnded

    @contextmanager
    def _ending(self, end: Callable[[], None]) -> Iterator[None]:
        """In this block call `end` when the loop is to end, or its time for Redis is up."""
        self.stop.interrupts.add(end)
        try:
            with Deadline(), nullcontext() if self._together else self.stop.waking(end):
                yield
        finally:
            self.stop.interrupts.discard(end)

    def _open_loader(self) -> ExperienceLoader:
        loader = ExperienceLoader(
            self.stream,
            self.size,
            steps=self._left,
            acknowledge=False,
            prefetch=self.prefetch,
            device=self.device,
            pin_memory=self.pin_memory,
            timeout=self.timeout,
            first_step=self._first_step + self._taken,
            rank=self.rank,
            world_size=self.world_size,
        )
        self._batches = iter(loader)
        return loader

    def _close_loader(self) -> None:
        loader, self._loader = self._loader, None
        if loader is not None:
            self._waited_s += loader.wait_for_batch_s
            loader.close()


_ADVICE = (
    "A task keeps the fields of the groups that were put first, so put groups with {0!r} into "
    "another task, or into this one after `redrb rm`."
)


def reject_incomplete(error: RecordError, batch: Experience, leases: Sequence[Lease]) -> bool:
    """Reject the groups of a batch that lack the field for which its step has failed.

    The other groups are requeued unharmed, and the error names the rejected ones. If no group lacks
    the field, nothing is rejected, and the result is False.
    """
    field = error.field
    if field is None or batch.tensors.get(field, getattr(batch, field, None)) is not None:
        return False
    lacking = [
        (lease, [seq for seq, group in lease.layouts.items() if field not in _fields(group)])
        for lease in leases
    ]
    error.ids = tuple(seq for _, ids in lacking for seq in ids)
    if not error.ids:
        return False
    tasks = ", ".join(sorted({part.task for lease in leases for part in lease.parts}))
    log_rejected(error, tasks, sum(map(len, leases)), _ADVICE.format(field))
    for lease, ids in lacking:
        try:
            if ids:
                lease.reject(error, ids)
            if lease:
                lease.release()
        except LeaseLost as lost:
            _log.warning("other consumers train some of these groups: %s", lost)
    return True


def log_rejected(error: RecordError, task: str, total: int, advice: str = "") -> None:
    """Log, and note in the error, that groups without a usable field are dead letters now."""
    bad = len(error.ids)
    why = (
        f"task {task!r}: {bad} of the {total} groups of a batch {agreeing(bad, 'have')} no usable "
        f"{error.field!r}, and {agreeing(bad, 'are')} among the dead letters now: "
        f"{str(error).rstrip('.')}. {advice}"
    ).rstrip()
    _log.error("%s", why)
    error.add_note(why)


def _fields(group: GroupLayout) -> set[str]:
    return {column.name for column in group.fields}
