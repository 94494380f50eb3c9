"""The loop of `DetachedTrainer.fit`: episodes of batches, trained in epochs, then an update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from redrb.connection.outage import Outage
from redrb.connection.stop import Stop
from redrb.errors import BatchTimeout, LeaseLost, RecordError, StoreUnavailable
from redrb.experience import Experience
from redrb.runtime.buffer import DetachedReplayBuffer
from redrb.runtime.checkpoint import Checkpoints, Position, Stateful, Unacked
from redrb.runtime.fresh_batches import FitEnded, FreshBatches
from redrb.runtime.missing_fields import reject_incomplete
from redrb.runtime.progress import ProgressBar
from redrb.runtime.trainer_settings import BatchSettings, CheckpointSettings
from redrb.runtime.world import any_rank, world_size_here
from redrb.stream import Lease

_log = logging.getLogger("redrb")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """The parts of a trainer that its loop uses.

    Attributes:
        buffer: The trainer's buffer.
        train: Trains on one batch and returns metrics.
        sample: Returns a fresh batch, by `FreshBatches.next`.
        update: Sends new weights to the makers.
        call: Calls a hook of the trainer by its name.
        stop: Asks the loop to end.
        batches: How batches are taken and placed.
        checkpointing: When checkpoints are written and batches acknowledged.
        checkpoints: The checkpoints; None: none are written.
        parts: Modules, optimizers and the like that a checkpoint holds, by name.
    """

    buffer: DetachedReplayBuffer
    train: Callable[[Experience], Mapping[str, Any]]
    sample: Callable[[], Experience]
    update: Callable[[], None]
    call: Callable[..., None]
    stop: Stop
    batches: BatchSettings
    checkpointing: CheckpointSettings
    checkpoints: Checkpoints | None
    parts: Mapping[str, Stateful]


@dataclass(slots=True)
class TrainingLoop:
    """One call of `fit`.

    Attributes:
        config: The trainer's parts.
        position: How far training has come; changed as the loop goes on.
        episodes: Episodes of this call; None: train until asked to end.
        update_steps: Fresh batches in an episode.
        train_epochs: Times that each batch is trained.
        fresh: The fresh batches of this call.
        leased: Leases of batches that were trained and not acknowledged yet.
        ended: Whether the loop was asked to end, on any rank.
        in_step: Whether a step has begun and not ended, so that its effect is unknown.
    """

    config: LoopConfig
    position: Position
    episodes: int | None
    update_steps: int
    train_epochs: int
    fresh: FreshBatches = field(init=False)
    leased: list[Lease] = field(default_factory=list)
    ended: bool = False
    in_step: bool = False

    def __post_init__(self) -> None:
        config, batches = self.config, None
        if self.episodes is not None:
            batches = self.episodes * self.update_steps - self.position.fresh(self.update_steps)
        self.fresh = FreshBatches(
            config.buffer.stream,
            config.buffer.sample_batch_size,
            config.batches,
            config.stop,
            in_step=world_size_here() > 1,
            batches=batches,
            first_step=self.position.taken,
            may_skip_steps=config.checkpointing.ack == "step",
            on_misfits=lambda error: config.call("on_misfits", error),
        )

    def run(self) -> None:
        """Train until all episodes are over, or the loop is asked to end.

        Ranks of torch.distributed agree before each step whether they end, so that none of them
        waits in a collective operation for a rank that has ended.
        """
        steps = None
        if self.episodes is not None:
            steps = self.episodes * self.update_steps * self.train_epochs
        progress = ProgressBar("train", steps, done=self.position.step)
        try:
            with self.config.stop.on_signals(), self.fresh, progress:
                self._run(progress)
        finally:
            self._release()

    def _run(self, progress: ProgressBar) -> None:
        call = self.config.call
        call("on_fit_start")
        try:
            while self._episodes_left() and not self._ends():
                self._episode(progress)
        except BatchTimeout:
            self._checkpoint()  # finished steps survive this process
            raise
        except StoreUnavailable:
            if not self.in_step:
                self._save()
            raise
        unsaved = self.position.episode % self.config.checkpointing.every
        if self.ended or unsaved or self.leased:
            self._checkpoint()
        call("on_fit_end")

    def _release(self) -> None:
        """Requeue batches that were not acknowledged: a resumed run trains them again."""
        leased, self.leased = self.leased, []
        for lease in filter(None, leased):
            try:
                lease.release()
            except LeaseLost as error:
                _log.warning("a batch was lost before it could be released: %s", error)
            except StoreUnavailable as error:  # the error that ended the loop matters more
                _log.warning("a batch is requeued when Redis is back: %s", error)
                lease.abandon()

    def _episodes_left(self) -> bool:
        return self.episodes is None or self.position.episode < self.episodes

    def _ends(self) -> bool:
        """Return whether the loop ends here; all ranks get the same answer."""
        self.ended = self.ended or any_rank(bool(self.config.stop))
        return self.ended

    def _episode(self, progress: ProgressBar) -> None:
        config, position = self.config, self.position
        call = config.call
        call("on_episode_start", position.episode)
        while position.epoch < self.train_epochs:
            call("on_epoch_start", position.epoch)
            if position.epoch == 0:
                self._train_fresh(progress)
            else:
                self._train_kept(progress)
            if self.ended:
                return
            call("on_epoch_end", position.epoch)
            position.epoch, position.batch, position.order = position.epoch + 1, 0, []
        call("on_update_start")
        try:
            config.update()
        except StoreUnavailable as error:
            _log.error("makers keep their old weights until the next update: %s", error)
        call("on_update_end")
        call("on_episode_end", position.episode)
        position.episode, position.epoch, position.kept = position.episode + 1, 0, []
        if config.checkpoints is not None and position.episode % config.checkpointing.every == 0:
            self._checkpoint()

    def _train_fresh(self, progress: ProgressBar) -> None:
        """Train each batch as it comes; keep a copy of it for later epochs, if there are any.

        Tensors that the step adds to the batch, such as the log-probabilities of the policy before
        it, are kept with the copy: later epochs need the same.
        """
        position = self.position
        while position.batch < self.update_steps and not self._ends():
            try:
                experience = self.config.sample()
            except FitEnded:
                self.ended = True
                return
            leases = self.fresh.leases()
            kept = None
            if self.train_epochs > 1:  # a step may change its batch, so copy it on the CPU as well
                kept = deepcopy(experience).to_device("cpu")
            try:
                self._step(experience)
            except BaseException as error:
                if self._sets_aside(error, experience, leases):
                    continue
                for lease in leases:
                    lease.__exit__(type(error), error, error.__traceback__)
                raise
            position.taken += len(leases)
            if kept is not None:
                kept.tensors |= {
                    name: tensor.cpu()
                    for name, tensor in experience.tensors.items()
                    if name not in kept.tensors
                }
                position.kept.append(kept)
            self.leased += leases
            if self.config.checkpointing.ack == "step":
                self._acknowledge_leased()
            progress.advance(position)

    def _sets_aside(
        self, error: BaseException, experience: Experience, leases: Sequence[Lease]
    ) -> bool:
        """Reject groups without a field that the step needs; returns whether to train others.

        Ranks end with the error: the others may wait in the step for this one.
        """
        if not isinstance(error, RecordError) or not reject_incomplete(error, experience, leases):
            return False
        self.in_step = False
        self.config.call("on_misfits", error)
        return self.config.batches.rank is None and world_size_here() == 1

    def _train_kept(self, progress: ProgressBar) -> None:
        """Train the kept batches in a new random order."""
        position, settings = self.position, self.config.batches
        if not position.order:
            position.order = torch.randperm(len(position.kept)).tolist()
        batches: DataLoader[Experience] = DataLoader(
            position.kept,  # type: ignore[arg-type]
            batch_size=None,
            sampler=position.order[position.batch :],
            pin_memory=settings.pin_memory and settings.device.type != "cpu",
            # by default each start draws from torch's generator, and a resumed run would differ
            generator=torch.Generator(),
        )
        for kept in batches:
            if self._ends():
                return
            self._step(deepcopy(kept).to_device(settings.device))
            progress.advance(position)

    def _step(self, experience: Experience) -> None:
        call, self.in_step = self.config.call, True
        call("on_batch_start")
        metrics = self.config.train(experience)
        call("on_batch_end", dict(metrics), experience)
        self.position.batch += 1
        self.position.step += 1
        self.in_step = False
        steps = self.config.buffer.stream.worker.steps
        steps.end()
        steps.begin()  # updates and checkpoints may hang as well

    def _checkpoint(self) -> None:
        """Write a checkpoint, if there are any, then acknowledge the batches that it holds."""
        self._save()
        self._acknowledge_leased()

    def _acknowledge_leased(self) -> None:
        while self.leased:
            self._acknowledge(self.leased[0])
            del self.leased[0]

    def _save(self) -> None:
        """Write a checkpoint, if there are any; it names the groups not acknowledged yet."""
        if self.config.checkpoints is not None:
            unacked: Unacked = {}
            for lease in self.leased:
                for seq, layout in lease.layouts.items():
                    unacked.setdefault(lease.incarnation, {})[seq] = layout.samples
            self.config.checkpoints.save(self.config.parts, self.position, unacked)

    def _acknowledge(self, lease: Lease) -> None:
        """Acknowledge a batch; while Redis is away, repeat it until the loop is asked to end."""
        outage = Outage("a trained batch cannot be acknowledged yet")
        while lease:
            try:
                lease.ack()
                outage.over()
            except LeaseLost as error:
                _log.warning("another trainer will train a batch again: %s", error)
                self.config.call("on_batch_lost", error)
            except StoreUnavailable as error:
                if self.config.stop:
                    raise
                outage.failed(error)
