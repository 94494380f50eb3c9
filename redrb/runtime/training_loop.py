"""The loop of `DetachedTrainer.fit`: episodes of fresh batches, in epochs, then an update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch.utils.data import DataLoader

from redrb.errors import BatchTimeout, LeaseLost, StoreUnavailable
from redrb.experience import Experience
from redrb.runtime.callbacks import Callbacks
from redrb.runtime.checkpoint import Checkpoints, Mark, Position, Stateful
from redrb.runtime.progress import Progress
from redrb.runtime.stopping import StopRequest
from redrb.runtime.world import agreed
from redrb.stream import Lease

_log = logging.getLogger("redrb")

Acknowledge: TypeAlias = Literal["step", "checkpoint"]


class Source(Protocol):
    """Where fresh batches come from."""

    def next(self) -> tuple[Experience, Lease] | None:
        """Return the next batch and its lease, None when the loop was asked to end meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """What a trainer does in its loop.

    Attributes:
        train: `training_step`.
        update: Sends new weights to the makers.
        callbacks: Whom to tell.
        stop: Asks for the end.
        device: Where batches are trained.
        pin_memory: Whether kept batches are pinned.
        acknowledge: After each step, or after each checkpoint.
        checkpoints: Where they go; None: there are none.
        checkpoint_every: Episodes between them.
        parts: What they hold.
    """

    train: Callable[[Experience], Mapping[str, Any]]
    update: Callable[[], None]
    callbacks: Callbacks
    stop: StopRequest
    device: torch.device
    pin_memory: bool
    acknowledge: Acknowledge
    checkpoints: Checkpoints | None
    checkpoint_every: int
    parts: Mapping[str, Stateful]


@dataclass(slots=True)
class TrainingLoop:
    """One call of `fit`."""

    work: LoopConfig
    position: Position
    update_steps: int
    train_epochs: int
    held: list[Lease] = field(default_factory=list)
    ended: bool = False
    stepping: bool = False  # in a step, of which nobody knows how much is done

    def run(self, episodes: int | None, source: Source, progress: Progress) -> None:
        """Train until `episodes` are over, or the loop is asked to end.

        Ranks of torch.distributed agree at each step whether they end, so that none of them waits
        in a collective operation for one that has.
        """
        tell = self.work.callbacks.tell
        tell("on_fit_start")
        try:
            while (episodes is None or self.position.episode < episodes) and not self._ends():
                self._episode(source, progress)
        except BatchTimeout:
            self.checkpoint()  # what was trained is not lost with this process
            raise
        except StoreUnavailable:
            if not self.stepping:
                self.save()
            raise
        if self.ended or self.position.episode % self.work.checkpoint_every or self.held:
            self.checkpoint()
        tell("on_fit_end")

    def checkpoint(self) -> None:
        """Write a checkpoint, where there are any, and then acknowledge what it has trained."""
        self.save()
        while self.held:
            self._acknowledge(self.held[0])
            del self.held[0]

    def save(self) -> None:
        """Write a checkpoint, where there are any, with a mark of what is not acknowledged."""
        if self.work.checkpoints is not None:
            trained = {
                seq: layout.samples for lease in self.held for seq, layout in lease.layouts.items()
            }
            mark = Mark(tuple(trained), tuple(trained.values()))
            self.work.checkpoints.save(self.work.parts, self.position, mark)

    def _ends(self) -> bool:
        """Return whether the loop ends here, on all ranks alike."""
        self.ended = self.ended or agreed(bool(self.work.stop))
        return self.ended

    def release(self) -> None:
        """Give back what was trained since the last checkpoint: a resumed run trains it again."""
        held, self.held = self.held, []
        for lease in filter(None, held):
            try:
                lease.release()
            except LeaseLost as error:
                _log.warning("a batch was lost before it was given back: %s", error)
            except StoreUnavailable as error:  # what ended the loop matters more
                _log.warning("a batch goes back when Redis is there again: %s", error)
                lease.abandon()

    def _episode(self, source: Source, progress: Progress) -> None:
        work, position = self.work, self.position
        tell = work.callbacks.tell
        tell("on_episode_start", position.episode)
        while position.epoch < self.train_epochs:
            tell("on_epoch_start", position.epoch)
            if position.epoch == 0:
                self._train_fresh(source, progress)
            else:
                self._train_again(progress)
            if self.ended:
                return
            tell("on_epoch_end", position.epoch)
            position.epoch, position.batch, position.order = position.epoch + 1, 0, []
        tell("on_update_start")
        try:
            work.update()
        except StoreUnavailable as error:
            _log.error("makers keep their old weights until the next update: %s", error)
        tell("on_update_end")
        tell("on_episode_end", position.episode)
        position.episode, position.epoch, position.kept = position.episode + 1, 0, []
        if work.checkpoints is not None and position.episode % work.checkpoint_every == 0:
            self.checkpoint()

    def _train_fresh(self, source: Source, progress: Progress) -> None:
        """Train each batch as it comes, and keep it for later epochs."""
        position = self.position
        while position.batch < self.update_steps and not self._ends():
            found = source.next()
            if found is None:
                self.ended = True
                return
            experience, lease = found
            kept = None
            if self.train_epochs > 1:  # a copy also where both are on the CPU
                kept = deepcopy(experience).to_device("cpu")
            try:
                self._step(experience)
            except BaseException as error:
                lease.__exit__(type(error), error, error.__traceback__)
                raise
            position.taken += 1
            if kept is not None:
                position.kept.append(kept)
            self.held.append(lease)
            if self.work.acknowledge == "step":
                self._acknowledge(lease)
                self.held.pop()
            progress.advance(position)

    def _train_again(self, progress: Progress) -> None:
        """Train the kept batches in a new order."""
        position = self.position
        if not position.order:
            position.order = torch.randperm(len(position.kept)).tolist()
        batches: DataLoader[Experience] = DataLoader(
            position.kept,  # type: ignore[arg-type]
            batch_size=None,
            sampler=position.order[position.batch :],
            pin_memory=self.work.pin_memory and self.work.device.type != "cpu",
            generator=torch.Generator(),  # else it would draw from torch's own, each time it starts
        )
        for kept in batches:
            if self._ends():
                return
            self._step(deepcopy(kept).to_device(self.work.device))
            progress.advance(position)

    def _step(self, experience: Experience) -> None:
        tell, self.stepping = self.work.callbacks.tell, True
        tell("on_batch_start")
        metrics = self.work.train(experience)
        tell("on_batch_end", dict(metrics), experience)
        self.position.batch += 1
        self.position.step += 1
        self.stepping = False

    def _acknowledge(self, lease: Lease) -> None:
        """Acknowledge; while Redis is away, again and again until the loop is asked to end."""
        while lease:
            try:
                lease.ack()
            except LeaseLost as error:
                self._lost(error)
            except StoreUnavailable as error:
                if self.work.stop:
                    raise
                _log.warning("what was trained cannot be acknowledged yet: %s", error)

    def _lost(self, error: LeaseLost) -> None:
        _log.warning("a batch was trained here and will be trained again elsewhere: %s", error)
        self.work.callbacks.tell("on_batch_lost", error)
