"""The hooks that subclasses of trainers and makers may override, as in ColossalAI.

Each calls the hook of the same name of all callbacks; `redrb.runtime.callbacks` says when.
"""

from __future__ import annotations

from typing import Any

from redrb.errors import LeaseLost, RecordError
from redrb.experience import Experience
from redrb.runtime.callbacks import Callbacks


class TrainerHooks:
    """Hooks of `DetachedTrainer.fit`."""

    _callbacks: Callbacks

    def _on_fit_start(self) -> None:
        self._callbacks.call("on_fit_start")

    def _on_fit_end(self) -> None:
        self._callbacks.call("on_fit_end")

    def _on_episode_start(self, episode: int) -> None:
        self._callbacks.call("on_episode_start", episode)

    def _on_episode_end(self, episode: int) -> None:
        self._callbacks.call("on_episode_end", episode)

    def _on_epoch_start(self, epoch: int) -> None:
        self._callbacks.call("on_epoch_start", epoch)

    def _on_epoch_end(self, epoch: int) -> None:
        self._callbacks.call("on_epoch_end", epoch)

    def _on_batch_start(self) -> None:
        self._callbacks.call("on_batch_start")

    def _on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
        self._callbacks.call("on_batch_end", metrics, experience)

    def _on_batch_lost(self, error: LeaseLost) -> None:
        self._callbacks.call("on_batch_lost", error)

    def _on_misfits(self, error: RecordError) -> None:
        self._callbacks.call("on_misfits", error)

    def _on_update_start(self) -> None:
        self._callbacks.call("on_update_start")

    def _on_update_end(self) -> None:
        self._callbacks.call("on_update_end")


class MakerHooks:
    """Hooks of `ExperienceMakerHolder.workingloop`."""

    _callbacks: Callbacks

    def _on_loop_start(self) -> None:
        self._callbacks.call("on_loop_start")

    def _on_loop_end(self) -> None:
        self._callbacks.call("on_loop_end")

    def _on_batch_start(self) -> None:
        self._callbacks.call("on_batch_start")

    def _on_batch_end(self) -> None:
        self._callbacks.call("on_batch_end")

    def _on_make_experience_start(self) -> None:
        self._callbacks.call("on_make_experience_start")

    def _on_make_experience_end(self, experience: Experience) -> None:
        self._callbacks.call("on_make_experience_end", experience)

    def _on_send_start(self) -> None:
        self._callbacks.call("on_send_start")

    def _on_send_end(self) -> None:
        self._callbacks.call("on_send_end")
