"""Callbacks of trainers and makers: subclass one and pass a list of objects.

The hooks and their order are those of ColossalAI's `coati.ray.callbacks`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from redrb.errors import ConfigError, LeaseLost, RecordError
from redrb.experience import Experience
from redrb.watch.metrics.events import Write

T = TypeVar("T")


class TrainerCallback:
    """Hooks of `DetachedTrainer.fit`.

    The order is: fit_start; for each episode episode_start, for each epoch (epoch_start, for each
    batch (batch_start, batch_end), epoch_end), update_start, update_end, episode_end; fit_end.
    coati has no batch_lost and no misfits; they are called when these events happen. Hooks are
    called in the thread of `fit`; an exception in a hook ends `fit`.
    """

    def on_fit_start(self) -> None:
        """Before the first episode."""

    def on_fit_end(self) -> None:
        """After the last episode, or after `fit` was asked to end."""

    def on_episode_start(self, episode: int) -> None:
        """Before fresh batches are taken; episodes count from 0."""

    def on_episode_end(self, episode: int) -> None:
        """After the makers got new weights."""

    def on_epoch_start(self, epoch: int) -> None:
        """Before a pass over the episode's batches; epoch 0 trains fresh batches as they come."""

    def on_epoch_end(self, epoch: int) -> None:
        """After a pass over the episode's batches."""

    def on_batch_start(self) -> None:
        """Before `training_step`; the batch was already taken."""

    def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
        """After `training_step`, before the batch is acknowledged.

        Args:
            metrics: Result of `training_step`.
            experience: The batch, on the trainer's device.
        """

    def on_batch_lost(self, error: LeaseLost) -> None:
        """When leases were not renewed for `lease_ms`: another trainer trains the batch again."""

    def on_misfits(self, error: RecordError) -> None:
        """When groups (`error.ids`) fit into no batch or lack a field, and are dead letters now."""

    def on_update_start(self) -> None:
        """Before new weights are sent to the makers."""

    def on_update_end(self) -> None:
        """After new weights were sent to the makers."""


class MakerCallback:
    """Hooks of `ExperienceMakerHolder.workingloop`.

    The order is: loop_start; for each batch of prompts batch_start, make_experience_start,
    make_experience_end, send_start, send_end, batch_end; loop_end. Where rewards come one after the
    other, the four hooks between batch_start and batch_end are called for each part of the batch.
    Hooks are called in the thread of the loop; an exception in a hook ends the loop.
    """

    def on_loop_start(self) -> None:
        """After the first weights were loaded, before the first batch of prompts."""

    def on_loop_end(self) -> None:
        """After all experience was sent."""

    def on_batch_start(self) -> None:
        """Before a batch of prompts is processed."""

    def on_batch_end(self) -> None:
        """After the experience of a batch was handed to the sender."""

    def on_make_experience_start(self) -> None:
        """Before generation; the model lock is held, except for later parts of a batch."""

    def on_make_experience_end(self, experience: Experience) -> None:
        """After generation and scoring; the model lock is held as at the start."""

    def on_send_start(self) -> None:
        """Before the experience is handed to the sender."""

    def on_send_end(self) -> None:
        """After the experience was handed to the sender, which sends it in the background."""


class _Each:
    """Has each hook of several callbacks: to call it calls theirs, in their order."""

    def __init__(self, callbacks: Sequence[object]) -> None:
        self._callbacks = callbacks

    def __getattr__(self, hook: str) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            for callback in self._callbacks:
                getattr(callback, hook)(*arguments)

        return call


def together(callbacks: Iterable[T], kind: type[T]) -> T:
    """Return one callback whose hooks call those of all; raises ConfigError if one is no `kind`."""
    checked = list(callbacks)
    for callback in checked:
        if not isinstance(callback, kind):
            raise ConfigError(
                f"a callback is a {type(callback).__name__}: subclass redrb.{kind.__name__}."
            )
    return cast("T", _Each(checked))


def refuse_hooks(subclass: type, kind: type) -> None:
    """Raise ConfigError if a subclass overrides hooks of coati, since nothing calls them."""
    for hook in dir(subclass):
        if hook.startswith("_on_") and hasattr(kind, hook[1:]):
            raise ConfigError(
                f"{subclass.__name__}.{hook} would not be called: give callbacks=[...] an object "
                f"of a subclass of redrb.{kind.__name__} with the method {hook[1:]}."
            )


class TrainerEvents(TrainerCallback):
    """Writes an event `step` for each batch: its metrics, samples, mean reward and time.

    Examples:
        >>> with TensorBoardLog("runs/first") as log:
        ...     trainer = DetachedPPOTrainer(..., callbacks=[TrainerEvents(log.write)])
        ...     trainer.sync_models_to_remote_makers()
        ...     trainer.fit(total_steps=1000, update_steps=10)
    """

    def __init__(self, write: Write) -> None:
        """Write events by a function, such as `TensorBoardLog(folder).write`."""
        self._write = write
        self.steps = 0
        self._began = time.perf_counter()

    def on_batch_start(self) -> None:
        """Begin to measure a step."""
        self._began = time.perf_counter()

    def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
        """Write the step."""
        self.steps += 1
        reward = experience.reward
        mean = {} if reward is None else {"reward": float(reward.float().mean())}
        self._write_step({**mean, **metrics}, experience)

    def on_batch_lost(self, error: LeaseLost) -> None:
        """Write that another trainer trains the batch again: delivery is at least once."""
        self._write("lease_lost", step=self.steps, why=str(error))

    def on_misfits(self, error: RecordError) -> None:
        """Write the ids of groups that fit into no batch."""
        self._write("misfits", step=self.steps, groups=list(error.ids), why=str(error))

    def on_update_start(self) -> None:
        """Begin to measure the update of the makers."""
        self._began = time.perf_counter()

    def on_update_end(self) -> None:
        """Write the time of the update."""
        self._write("publish", step=self.steps, publish_s=time.perf_counter() - self._began)

    def _write_step(self, metrics: dict[str, Any], experience: Experience, **more: Any) -> None:
        step_s = time.perf_counter() - self._began
        figures = {"step": self.steps, "samples": len(experience), "step_s": step_s}
        self._write("step", **{**metrics, **figures, **more})


class MakerEvents(MakerCallback):
    """Writes an event `put` for each batch of prompts: its samples, mean reward and times.

    `make_s` is the time of making, and of waiting for rewards; `send_s` that for which sending
    blocked the loop. A batch that is sent in several parts is summed up.
    """

    def __init__(self, write: Write) -> None:
        """Write events by a function, such as `TensorBoardLog(folder).write`."""
        self._write = write
        self._steps = self._samples = 0
        self._rewards: list[Tensor] = []
        self._make_s = self._send_s = self._began = 0.0

    def on_batch_start(self) -> None:
        """Begin to sum up a batch of prompts, and to measure generation and scoring."""
        self._samples, self._rewards = 0, []
        self._make_s = self._send_s = 0.0
        self._began = time.perf_counter()

    def on_make_experience_end(self, experience: Experience) -> None:
        """Note the samples."""
        self._make_s += time.perf_counter() - self._began
        self._samples += len(experience)
        if experience.reward is not None:
            self._rewards.append(experience.reward.float().flatten().cpu())

    def on_send_start(self) -> None:
        """Begin to measure sending."""
        self._began = time.perf_counter()

    def on_send_end(self) -> None:
        """Note the time of sending; later parts of the batch are made from now on."""
        began, self._began = self._began, time.perf_counter()
        self._send_s += self._began - began

    def on_batch_end(self) -> None:
        """Write the step."""
        self._write_step()

    def _write_step(self, **more: Any) -> None:
        self._steps += 1
        rewards = torch.cat(self._rewards) if self._rewards else torch.zeros(0)
        known = rewards[rewards.isfinite()]
        self._write(
            "put",
            step=self._steps,
            samples=self._samples,
            reward=float(known.mean()) if len(known) else None,
            make_s=self._make_s,
            send_s=self._send_s,
            **more,
        )
