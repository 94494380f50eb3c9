"""The training loop: episodes of fresh batches, further epochs over them, updates of the makers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from redrb.algorithms.experience_makers import RAW_REWARD
from redrb.checks import checked_int
from redrb.connection.deadline import Deadline
from redrb.connection.outage import Outage
from redrb.errors import (
    BatchTimeout,
    CheckpointFailed,
    ConfigError,
    LeaseLost,
    PublisherFenced,
    RecordError,
    RedrbError,
    StoreUnavailable,
)
from redrb.experience import Experience
from redrb.stream import Lease
from redrb.stream.announcement import EQUAL_REWARDS
from redrb.stream.take.hand_back import hand_back
from redrb.train.callbacks import TrainerCallback
from redrb.train.checkpoint import Checkpoints, Position, Stateful, Unacked
from redrb.train.fresh_batches import FitEnded, FreshBatches, reject_incomplete
from redrb.train.world import any_rank, newest_common_step, world_size_here

_log = logging.getLogger("redrb")


class Hooks(Protocol):
    """The methods of a trainer that its loop calls; see `Trainer`."""

    name: str

    def next_batch(self) -> Experience:
        """Return a fresh batch."""

    def training_step(self, experience: Experience) -> Mapping[str, Any]:
        """Train on one batch and return metrics by name."""

    def send_weights(self) -> None:
        """Send new weights to the makers."""

    def checkpointed(self) -> Mapping[str, Stateful]:
        """Return the parts of a checkpoint, by name."""


@dataclass
class TrainingLoop:
    """Trains fresh batches in calls of `fit`, and goes on from checkpoints.

    Attributes:
        batches: The fresh batches, and how they are taken.
        checkpoints: The checkpoints; None: none are written.
        position: How far training has come; the beginning until `resume` was called.

    Raises:
        ConfigError: `ack` is unknown or needs checkpoints, or `checkpoint_every` is below 1.
    """

    trainer: Hooks
    batches: FreshBatches
    checkpoints: Checkpoints | None
    checkpoint_every: int
    callbacks: TrainerCallback
    position: Position = field(default_factory=Position)
    _resumed: bool = False
    _calls: int = 0
    _leased: list[Lease] = field(default_factory=list)  # trained, and not acknowledged yet
    _ended: bool = False  # asked to end, on any rank
    _equal: int | torch.Tensor = 0  # steps until now, in each of which all rewards were equal
    _in_step: bool = False  # a step has begun and not ended, so that its effect is unknown

    def __post_init__(self) -> None:
        ack = self.batches.ack
        if ack not in ("step", "checkpoint") or (ack == "checkpoint" and self.checkpoints is None):
            raise ConfigError(
                f'ack={ack!r}: use "step", or "checkpoint" together with a checkpoint_dir.'
            )
        checked_int("checkpoint_every", self.checkpoint_every, 1)

    def resume(self) -> bool:
        """Load the newest checkpoint that all ranks have, unless it was loaded; all call it."""
        if self.checkpoints is not None and not self._resumed:
            parts = self.trainer.checkpointed()
            if not parts:
                raise ConfigError(
                    "there is nothing for a checkpoint to hold: modules and optimizers are found "
                    "in the trainer's attributes, and in lists and dicts there; or override "
                    "checkpointed()."
                )
            step = newest_common_step(self.checkpoints.steps())
            if step is not None:
                position, unacked = self.checkpoints.load(step, parts)
                self.checkpoints.forget_after(step)
                # groups that the checkpoint holds as trained
                for incarnation, groups in unacked.items():
                    self.batches.stream.settle(groups, incarnation=incarnation)
                self.position = position
                _log.info("trainer %r goes on after step %d", self.trainer.name, position.step)
        self._resumed = True
        return self.position.step > 0

    def fit(self, episodes: int | None, update_steps: int, train_epochs: int) -> None:
        """Train until all episodes are over, or the loop is asked to end.

        Ranks of torch.distributed agree before each step whether they end, so that none of them
        waits in a collective operation for a rank that has ended.
        """
        fresh, stop = self.batches, self.batches.stop
        self.resume()
        if any_rank(bool(stop)):
            return
        call, self._calls = self._calls, self._calls + 1
        if call < self.position.fit:
            _log.info("trainer %r: an earlier run has finished this fit", self.trainer.name)
            return
        if call > self.position.fit:
            self.position = Position(fit=call, step=self.position.step, taken=self.position.taken)
        position, left = self.position, None
        if episodes is not None:
            left = episodes * update_steps - position.fresh(update_steps)
        self._episodes, self._update_steps = episodes, update_steps
        self._train_epochs = train_epochs
        self._ended = self._in_step = False
        fresh.stream.expect(update_steps * fresh.size)
        with Deadline(budget=stop):
            try:
                with stop.on_signals(), fresh.taking(left, position.taken):
                    self._run()
            finally:
                self._release()

    def _run(self) -> None:
        self.callbacks.on_fit_start()
        try:
            while self._episodes is None or self.position.episode < self._episodes:
                if self._ends():
                    break
                self._episode()
        except BatchTimeout:
            self._checkpoint()  # finished steps survive this process
            raise
        except CheckpointFailed:
            raise
        except PublisherFenced:  # another trainer goes on from the checkpoints
            raise
        except RedrbError:
            if not self._in_step:
                self._save()
            raise
        unsaved = self.position.episode % self.checkpoint_every
        if self._ended or unsaved or self._leased:
            self._checkpoint()
        self.callbacks.on_fit_end()

    def _release(self) -> None:
        """Requeue batches that were not acknowledged: a resumed run trains them again."""
        leased, self._leased = self._leased, []
        for lease in leased:
            hand_back(lease)  # the error that ended the loop matters more

    def _ends(self) -> bool:
        self._ended = self._ended or any_rank(bool(self.batches.stop))
        return self._ended

    def _episode(self) -> None:
        position = self.position
        self.callbacks.on_episode_start(position.episode)
        while position.epoch < self._train_epochs:
            self.callbacks.on_epoch_start(position.epoch)
            if position.epoch == 0:
                self._train_fresh()
            else:
                self._train_kept()
            if self._ended:
                return
            self.callbacks.on_epoch_end(position.epoch)
            position.epoch, position.batch, position.order = position.epoch + 1, 0, []
        self.callbacks.on_update_start()
        try:
            self.trainer.send_weights()
        except StoreUnavailable as error:
            _log.error("makers keep their old weights until the next update: %s", error)
        self.callbacks.on_update_end()
        self.callbacks.on_episode_end(position.episode)
        position.episode, position.epoch, position.kept = position.episode + 1, 0, []
        if self.checkpoints is not None and position.episode % self.checkpoint_every == 0:
            self._checkpoint()

    def _train_fresh(self) -> None:
        """Train each batch as it comes; keep a copy of it for later epochs, if there are any.

        Tensors that the step adds to the batch, such as the log-probabilities of the policy before
        it, are kept with the copy: later epochs need the same.
        """
        position, fresh = self.position, self.batches
        while position.batch < self._update_steps and not self._ends():
            try:
                experience = self.trainer.next_batch()
            except FitEnded:
                self._ended = True
                return
            leases = fresh.leases()
            kept = None
            if self._train_epochs > 1:  # a step may change its batch, so copy it on the CPU as well
                kept = deepcopy(experience).to_device("cpu")
            try:
                self._step(experience)
            except BaseException as error:
                if isinstance(error, RecordError) and reject_incomplete(error, experience, leases):
                    self._in_step = False
                    self.callbacks.on_misfits(error)
                    # ranks end with the error: the others may wait in the step for this one
                    if fresh.rank is None and world_size_here() == 1:
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
            self._leased += leases
            if fresh.ack == "step":
                self._acknowledge_leased()

    def _train_kept(self) -> None:
        position, fresh = self.position, self.batches
        if not position.order:
            position.order = torch.randperm(len(position.kept)).tolist()
        for number in position.order[position.batch :]:
            if self._ends():
                return
            kept = deepcopy(position.kept[number])
            if fresh.pin_memory and fresh.device.type != "cpu":
                kept = kept.pin_memory()
            self._step(kept.to_device(fresh.device))

    def _step(self, experience: Experience) -> None:
        worker, self._in_step = self.batches.stream.worker, True
        self.callbacks.on_batch_start()
        metrics = dict(self.trainer.training_step(experience))
        reward = experience.tensors.get(RAW_REWARD, experience.reward)
        figures = {}
        if reward is not None:
            self._equal = (self._equal + 1) * (reward.amax() == reward.amin())  # no wait for a GPU
            figures = {"reward": reward.float().nanmean(), EQUAL_REWARDS: self._equal}
        worker.metrics = {**figures, **metrics}
        self.callbacks.on_batch_end(metrics, experience)
        self.position.batch += 1
        self.position.step += 1
        self._in_step = False
        worker.steps.end()
        worker.steps.begin()  # updates and checkpoints may hang as well

    def _checkpoint(self) -> None:
        self._save()
        self._acknowledge_leased()

    def _save(self) -> None:
        """Write a checkpoint, if there are any; it names the groups not acknowledged yet."""
        if self.checkpoints is not None:
            unacked: Unacked = {}
            for lease in self._leased:
                unacked.setdefault(lease.incarnation, {}).update(lease.unacknowledged)
            self.checkpoints.save(self.trainer.checkpointed(), self.position, unacked)

    def _acknowledge_leased(self) -> None:
        """Acknowledge the batches; while Redis is away, repeat it until the loop is to end."""
        outage = Outage("a trained batch cannot be acknowledged yet")
        while self._leased:
            lease = self._leased[0]
            if not lease:
                del self._leased[0]
                continue
            try:
                lease.ack()
                outage.over()
            except LeaseLost as error:
                _log.warning("another trainer will train a batch again: %s", error)
                self.callbacks.on_batch_lost(error)
            except StoreUnavailable as error:
                if self.batches.stop:
                    raise
                outage.failed(error)
