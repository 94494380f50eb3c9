"""What trainers and makers tell while they work: subclass and pass a list of them.

The hooks and their order are those of ColossalAI's `coati.ray.callbacks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from redrb.errors import ConfigError, LeaseLost, RecordError
from redrb.experience import Experience


class TrainerCallback:
    """Hooks of `DetachedTrainer.fit`, in this order.

    fit_start; then for each episode: episode_start, for each epoch (epoch_start, for each batch
    (batch_start, batch_end), epoch_end), update_start, update_end, episode_end; at last fit_end.
    batch_lost and misfits, which coati has not, come when that happens. Hooks are called in the
    thread of `fit`; an exception in one ends `fit`.
    """

    def on_fit_start(self) -> None:
        """Before the first episode."""

    def on_fit_end(self) -> None:
        """After the last episode, or when training was stopped in good order."""

    def on_episode_start(self, episode: int) -> None:
        """Before fresh batches are taken; counts from 0."""

    def on_episode_end(self, episode: int) -> None:
        """After the makers got the new weights."""

    def on_epoch_start(self, epoch: int) -> None:
        """Before a pass over the episode's batches; epoch 0 trains each as it comes."""

    def on_epoch_end(self, epoch: int) -> None:
        """After a pass over the episode's batches."""

    def on_batch_start(self) -> None:
        """Before `training_step`; the batch is there already."""

    def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
        """After `training_step`, before the batch is acknowledged.

        Args:
            metrics: What `training_step` returned.
            experience: The batch, on the trainer's device.
        """

    def on_batch_lost(self, error: LeaseLost) -> None:
        """When a batch that was trained turns out to be another's, who will train it again.

        That is so after this process was silent for longer than its lease.
        """

    def on_misfits(self, error: RecordError) -> None:
        """When groups fit into no batch: `error.ids` names them among the dead letters."""

    def on_update_start(self) -> None:
        """Before new weights go to the makers."""

    def on_update_end(self) -> None:
        """After new weights went to the makers."""


class MakerCallback:
    """Hooks of `ExperienceMakerHolder.workingloop`, in this order.

    loop_start; then for each batch of prompts: batch_start, make_experience_start,
    make_experience_end, send_start, send_end, batch_end; at last loop_end. Hooks are called in the
    thread of the loop; an exception in one ends it.
    """

    def on_loop_start(self) -> None:
        """When the models are there, before the first batch of prompts."""

    def on_loop_end(self) -> None:
        """After the last batch of prompts, when all of it was sent."""

    def on_batch_start(self) -> None:
        """Before anything is done with a batch of prompts."""

    def on_batch_end(self) -> None:
        """When its experience is on its way."""

    def on_make_experience_start(self) -> None:
        """Before generation; the model lock is held."""

    def on_make_experience_end(self, experience: Experience) -> None:
        """After generation and scoring; the model lock is held."""

    def on_send_start(self) -> None:
        """Before the experience is handed over to the sender."""

    def on_send_end(self) -> None:
        """After it was handed over: it goes on its way beside the next batch."""


class Callbacks:
    """A list of callbacks, called in its order."""

    def __init__(self, callbacks: Iterable[Any], kind: type) -> None:
        """Check them.

        Raises:
            ConfigError: One is not a `kind`.
        """
        self._all = list(callbacks)
        for callback in self._all:
            if not isinstance(callback, kind):
                raise ConfigError(
                    f"a callback is a {type(callback).__name__}: subclass redrb.{kind.__name__}."
                )

    def add(self, callback: Any) -> None:
        """Append one."""
        self._all.append(callback)

    def tell(self, hook: str, *arguments: int | Mapping[str, Any] | Experience | Exception) -> None:
        """Call `hook` of each."""
        for callback in self._all:
            getattr(callback, hook)(*arguments)
