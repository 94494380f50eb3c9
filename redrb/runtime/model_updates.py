"""A maker's models, and how they change: whole updates only, never seen half by generation."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from redrb.errors import WeightError, WeightMismatch
from redrb.weights.lora import LoraMerger
from redrb.weights.tensors.names import models_tensors, module_tensors
from redrb.weights.tensors.wrapping import unwrapped

_log = logging.getLogger("redrb")


@dataclass(slots=True)
class _Staged:
    """What has come of an update, by model, and whose it is."""

    owner: threading.Thread
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    loras: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = field(default_factory=dict)


class ModelUpdates:
    """Models that are used under one lock and updated whole.

    An update begins, gets its chunks, and ends. Chunks are collected beside the models, and the
    lock is held from the beginning, so that nothing is generated with weights about to be replaced.
    An update whose end does not come in time is dropped: the lock is free again, and the models
    have their old weights. All calls of an update come from the thread that began it, so that what
    comes late of one that was dropped never gets into the next one of another thread.

    Attributes:
        models: By name.
        lock: Held by generation, and while weights change.
    """

    def __init__(self, models: Mapping[str, nn.Module | None], *, timeout_s: float) -> None:
        """Take over models.

        Args:
            models: By name; those that are None are left out.
            timeout_s: Seconds from one call of an update to its next.
        """
        self.models = {
            name: unwrapped(model) for name, model in models.items() if model is not None
        }
        self.lock = threading.Lock()
        self._timeout_s = timeout_s
        self._mergers = {name: LoraMerger(model) for name, model in self.models.items()}
        self._staged: _Staged | None = None
        self._user: threading.Thread | None = None
        self._guard = threading.RLock()
        self._watch: threading.Timer | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors of all models, as `<model>.<name>`."""
        return models_tensors(self.models)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock; an update under way ends or is dropped in time, so this wait is bounded.

        Raises:
            WeightError: It was not free for ten times the timeout of an update, or this thread
                holds it already.
        """
        self._acquire()
        self._user = threading.current_thread()
        try:
            yield
        finally:
            self._user = None
            self.lock.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock, unless this thread makes experience and holds it already.

        Raises:
            WeightError: As `exclusive` does.
        """
        if self._user is threading.current_thread():
            yield
        else:
            with self.exclusive():
                yield

    def begin(self) -> None:
        """Begin an update: wait for the generation under way, and hold the lock.

        Raises:
            WeightError: As `exclusive` does.
        """
        self._acquire()
        with self._guard:
            self._staged = _Staged(threading.current_thread())
            self._watch_again()

    def stage(
        self, model: str, state: Mapping[str, Tensor], lora_configs: Mapping[str, Any] | None
    ) -> None:
        """Collect a chunk of an update.

        Args:
            model: Name of the model.
            state: Tensors by name.
            lora_configs: Where they are LoRA's: settings by layer.

        Raises:
            WeightError: No update of this thread is under way, or it was dropped; or there is no
                such model.
        """
        with self._guard:
            staged = self._under_way()
            if model not in self.models:
                raise WeightError(f"this maker has no {model}; it has {sorted(self.models)}.")
            copied = {name: tensor.detach().clone() for name, tensor in state.items()}
            if lora_configs is None:
                staged.states.setdefault(model, {}).update(copied)
            else:
                tensors, configs = staged.loras.setdefault(model, ({}, {}))
                tensors.update(copied)
                configs.update(lora_configs)
            self._watch_again()

    def end(self) -> None:
        """Load all that was collected, and release the lock.

        Raises:
            WeightError: No update of this thread is under way, or it was dropped.
            WeightMismatch: Something does not fit; the models keep their old weights.
        """
        with self._guard:
            staged = self._under_way()
            try:
                self.load(staged.states, staged.loras)
            finally:
                self._over()

    def drop(self) -> None:
        """Forget this thread's update under way; the models keep their old weights."""
        with self._guard:
            if self._staged is not None and self._staged.owner is threading.current_thread():
                self._over()

    def load(
        self,
        states: Mapping[str, Mapping[str, Tensor]],
        loras: Mapping[str, tuple[Mapping[str, Tensor], Mapping[str, Any]]],
    ) -> None:
        """Change the models; the lock is held by the caller.

        Raises:
            WeightMismatch: Shapes or LoRA layers do not fit; nothing was changed.
        """
        planned: list[Callable[[], None]] = []
        for model, state in states.items():
            planned.append(self._plan(model, state))
        for model, (tensors, configs) in loras.items():
            merger = self._mergers[model]
            planned.append(partial(merger.apply, merger.plan(tensors, configs)))
        for change in planned:
            change()
        for model in states:
            self._mergers[model].forget()

    def all_loaded(self) -> None:
        """Note that the weights of all models are new: what is merged later goes into these."""
        for merger in self._mergers.values():
            merger.forget()

    def _plan(self, model: str, state: Mapping[str, Tensor]) -> Callable[[], None]:
        """Return what loads the tensors that the model has, as `load_state_dict(strict=False)`."""
        live = module_tensors(self.models[model])
        fitting = {name: tensor for name, tensor in state.items() if name in live}
        for name, tensor in fitting.items():
            if tensor.shape != live[name].shape:
                raise WeightMismatch(
                    f"{model}.{name} is {list(tensor.shape)} in the update and "
                    f"{list(live[name].shape)} in the model. Nothing was loaded."
                )

        @torch.no_grad()
        def load() -> None:
            for name, tensor in fitting.items():
                live[name].copy_(tensor)

        return load

    def _acquire(self) -> None:
        if self._user is threading.current_thread():
            raise WeightError(
                "the models cannot be updated while this thread makes experience with them: do it "
                "in on_batch_start or on_send_start, not in on_make_experience_*."
            )
        patience_s = 10 * self._timeout_s
        if not self.lock.acquire(timeout=patience_s):
            raise WeightError(
                f"the models were in use for {patience_s:g} s: generation hangs, or updates come "
                "faster than they can be loaded."
            )

    def _under_way(self) -> _Staged:
        if self._staged is None or self._staged.owner is not threading.current_thread():
            raise WeightError(
                "no update is under way in this thread: the first call needs chunk_start=True, and "
                f"an update is dropped when its next call does not come within {self._timeout_s:g} "
                "s. Send all of it again."
            )
        return self._staged

    def _watch_again(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        staged = self._staged
        self._watch = threading.Timer(self._timeout_s, lambda: self._lost(staged))
        self._watch.daemon = True
        self._watch.start()

    def _lost(self, staged: _Staged | None) -> None:
        with self._guard:
            if staged is not None and self._staged is staged:
                _log.error(
                    "an update of the models did not end within %g s and was dropped: they keep "
                    "their old weights",
                    self._timeout_s,
                )
                self._over()

    def _over(self) -> None:
        self._staged = None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self.lock.release()
