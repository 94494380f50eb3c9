"""Fresh batches for the training loop, and groups that cannot be trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import torch

from redrb.checks import checked_int
from redrb.codec import GroupLayout
from redrb.connection.deadline import Deadline
from redrb.errors import ConfigError, LeaseLost, RecordError, WrongStep
from redrb.experience import Experience
from redrb.runtime.checkpoint import Checkpoints
from redrb.runtime.world import rank_here, world_size_here
from redrb.stream import Lease
from redrb.stream.feeding import ExperienceLoader
from redrb.stream.ranks.calls import MOST_STEPS

if TYPE_CHECKING:
    from redrb.runtime.training_loop import TrainingLoop

Acknowledge: TypeAlias = Literal["step", "checkpoint"]
"""When a trained batch is acknowledged: after its step, or after the checkpoint that holds it."""

_log = logging.getLogger("redrb")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """How a trainer takes and acknowledges batches, and writes checkpoints; see `DetachedTrainer`.

    Raises:
        ConfigError: Only one of `rank` and `world_size` is given; `ack` is unknown or needs a
            directory, or `checkpoint_every` is below 1.
    """

    device: torch.device
    pin_memory: bool
    prefetch: int
    timeout: float | None
    rank: int | None
    world_size: int | None
    ack: Acknowledge
    checkpoint_dir: str | Path | None
    checkpoint_every: int

    def __post_init__(self) -> None:
        if (self.rank is None) != (self.world_size is None):
            raise ConfigError("give rank and world_size, both or none.")
        if self.ack not in ("step", "checkpoint") or (
            self.ack == "checkpoint" and self.checkpoint_dir is None
        ):
            raise ConfigError(
                f'ack={self.ack!r}: use "step", or "checkpoint" together with a checkpoint_dir.'
            )
        checked_int("checkpoint_every", self.checkpoint_every, 1)

    def checkpoints(self, owner: str) -> Checkpoints | None:
        """Return the checkpoints of a trainer, of ranks each in a directory per rank."""
        if self.checkpoint_dir is None:
            return None
        if self.rank is None and world_size_here() == 1:
            return Checkpoints(Path(self.checkpoint_dir), owner=owner)
        # two are kept: ranks resume from the newest step of which all of them have a checkpoint
        rank = rank_here() if self.rank is None else self.rank
        return Checkpoints(Path(self.checkpoint_dir) / f"rank-{rank}", owner=owner, keep=2)

    def check_limits(self, update_steps: int) -> None:
        """Check that ranks may lease all batches between two checkpoints at once.

        Raises:
            ConfigError: The step protocol of ranks allows fewer.
        """
        leased = update_steps * self.checkpoint_every + 1 + self.prefetch
        if self.ack == "checkpoint" and self.rank is not None and leased > MOST_STEPS:
            raise ConfigError(
                f"ranks lease at most {MOST_STEPS} steps at once, and update_steps={update_steps} "
                f"with checkpoint_every={self.checkpoint_every} leases {leased} until a "
                'checkpoint: checkpoint more often, use fewer update_steps, or use ack="step".'
            )


class FitEnded(Exception):
    """Raised where a batch is asked for after the loop was asked to end."""


@dataclass
class FreshBatches:
    """Takes batches for a loop, without acknowledging them.

    Attributes:
        left: Number of batches that are still to come; None: no limit.
        in_step: Whether ranks take their batches together.
    """

    loop: TrainingLoop
    left: int | None
    first_step: int
    in_step: bool = field(default_factory=lambda: world_size_here() > 1)
    _taken: int = 0
    _unclaimed: list[Lease] = field(default_factory=list)
    _loader: ExperienceLoader | None = None
    _batches: Iterator[Experience] = field(default_factory=lambda: iter(()))
    _waited_s: float = 0.0

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
        while self.in_step or not self.loop.stop:
            loader = self._loader = self._loader or self._open_loader()
            with self._ending(loader.stop):
                try:
                    ends = self.loop.stop and not self.in_step
                    batch = None if ends else next(self._batches, None)
                except RecordError as error:
                    if not error.ids:
                        raise
                    _log.error("groups %s do not fit into a batch: %s", list(error.ids), error)
                    self._close_loader()
                    self.loop.callbacks.call("on_misfits", error)
                    continue
                except WrongStep as error:
                    # ranks go on at their next step, if the first one was already trained
                    if self.loop.settings.ack != "step" or self._taken:
                        raise
                    self._close_loader()
                    self.first_step = error.next_step
                    continue
            if batch is not None and loader.lease is not None:
                self._taken += 1
                self.left = None if self.left is None else self.left - 1
                self._unclaimed.append(loader.lease)
                return batch
            if not self.loop.stop.left_s:
                break
            if self.left is not None and self.left <= 0:  # a step took several batches
                self._close_loader()
                self.left = 1
        raise FitEnded

    @contextmanager
    def _ending(self, end: Callable[[], None]) -> Iterator[None]:
        """In this block call `end` when the loop is to end, or its time for Redis is up."""
        self.loop.stop.interrupts.add(end)
        try:
            with Deadline(), nullcontext() if self.in_step else self.loop.stop.waking(end):
                yield
        finally:
            self.loop.stop.interrupts.discard(end)

    def _open_loader(self) -> ExperienceLoader:
        settings = self.loop.settings
        ranks: dict[str, Any] = {}
        if settings.rank is not None:
            ranks = {"rank": settings.rank, "world_size": settings.world_size}
        loader = ExperienceLoader(
            self.loop.trainer.buffer.stream,
            self.loop.trainer.buffer.sample_batch_size,
            steps=self.left,
            acknowledge=False,
            prefetch=settings.prefetch,
            device=settings.device,
            pin_memory=settings.pin_memory,
            timeout=settings.timeout,
            first_step=self.first_step + self._taken,
            **ranks,
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

    The other groups are requeued unharmed. The error then names the rejected groups, and says how
    many they are.

    Returns:
        Whether groups were rejected. Otherwise nothing has ended: no group lacks the field.

    Raises:
        StoreUnavailable: Redis stayed away; groups may still be leased.
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
    """Log that groups without a field, or with one of another form, are dead letters now.

    The error gets the same text as a note.
    """
    why = (
        f"task {task!r}: {len(error.ids)} of the {total} groups of a batch have no usable "
        f"{error.field!r}, and are dead letters now: {str(error).rstrip('.')}. {advice}"
    ).rstrip()
    _log.error("%s", why)
    error.add_note(why)


def _fields(group: GroupLayout) -> set[str]:
    return {column.name for column in group.fields}
