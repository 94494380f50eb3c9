"""Updates of a maker's models: each is loaded as a whole, so generation never sees half of it."""

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
from redrb.weights.lora.merging import LoraMerger
from redrb.weights.tensors.names import models_tensors, module_tensors
from redrb.weights.tensors.wrapping import unwrapped

_log = logging.getLogger("redrb")


@dataclass(slots=True, eq=False)
class _Staged:
    """The chunks of an update so far, by model."""

    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    loras: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = field(default_factory=dict)


class ModelUpdates:
    """Models that are used under one lock and updated as a whole.

    An update begins, gets its chunks, and ends. Chunks are collected beside the models, and the
    lock is held from the beginning, so that nothing is generated with weights about to be replaced.
    If the end does not come in time, the update is dropped: the lock is free again, and the models
    keep their old weights. All calls of an update must come from the thread that began it, so that
    a late chunk of a dropped update never gets into the next update. After a drop, chunks of this
    thread are refused until it ends the update or begins another one.

    Attributes:
        models: The models by name.
        lock: Held by generation, and while weights change.
    """

    def __init__(self, models: Mapping[str, nn.Module | None], *, timeout_s: float) -> None:
        """Guard models.

        Args:
            models: The models by name; None is left out.
            timeout_s: Seconds between two calls of an update, until it is dropped.
        """
        self.models = {
            name: unwrapped(model) for name, model in models.items() if model is not None
        }
        self.lock = threading.Lock()
        self._timeout_s = timeout_s
        self._mergers = {name: LoraMerger(model) for name, model in self.models.items()}
        self._staged: _Staged | None = None
        self._own = threading.local()  # `staged`: the update that this thread has begun
        self._user: threading.Thread | None = None
        self._guard = threading.RLock()
        self._timer: threading.Timer | None = None

    @property
    def begun(self) -> bool:
        """Whether this thread has begun an update and not ended it; it may have been dropped."""
        return self._mine is not None

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors of all models, as `<model>.<name>`."""
        return models_tensors(self.models)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock; the wait is bounded, because an open update ends or is dropped.

        Raises:
            WeightError: The lock was not free for ten times the timeout of an update, or this
                thread holds it already.
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
        """Hold the lock; does nothing if this thread makes experience and holds it already."""
        if self._user is threading.current_thread():
            yield
        else:
            with self.exclusive():
                yield

    def begin(self) -> None:
        """Begin an update: wait until generation ends, and hold the lock.

        An update that this thread has begun and not ended is dropped.
        """
        with self._guard:
            if self._mine is not None and self._mine is self._staged:
                _log.warning("an update of the models was not ended, and another one begins")
                self._close_update()
            self._own.staged = None
        self._acquire()
        with self._guard:
            self._staged = self._own.staged = _Staged()
            self._restart_timer()

    def stage(
        self, model: str, state: Mapping[str, Tensor], lora_configs: Mapping[str, Any] | None
    ) -> None:
        """Collect a chunk of an update.

        Args:
            lora_configs: For tensors of LoRA: settings by layer; None for full weights.

        Raises:
            WeightError: This thread has no update under way, or it was dropped; or there is no such
                model.
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
            self._restart_timer()

    def end(self) -> None:
        """Load all chunks and release the lock.

        Raises:
            WeightError: This thread has no update under way, or it was dropped.
            WeightMismatch: A chunk does not fit; the models keep their old weights.
        """
        with self._guard:
            try:
                staged = self._under_way()
            finally:
                self._own.staged = None
            try:
                self.load(staged.states, staged.loras)
            finally:
                self._close_update()

    def drop(self, *, ended: bool = True) -> None:
        """Drop this thread's update, if one is under way; the models keep their old weights."""
        with self._guard:
            if self._mine is not None and self._mine is self._staged:
                self._close_update()
            if ended:
                self._own.staged = None

    def load(
        self,
        states: Mapping[str, Mapping[str, Tensor]],
        loras: Mapping[str, tuple[Mapping[str, Tensor], Mapping[str, Any]]],
    ) -> None:
        """Load weights and LoRA products by model; the caller holds the lock.

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
        """Note that all weights were replaced: later LoRA products are merged into the new ones."""
        for merger in self._mergers.values():
            merger.forget()

    def _plan(self, model: str, state: Mapping[str, Tensor]) -> Callable[[], None]:
        """Return a function that loads tensors, as `load_state_dict(strict=False)` would."""
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
        longest_s = 10 * self._timeout_s
        if not self.lock.acquire(timeout=longest_s):
            raise WeightError(
                f"the models were in use for {longest_s:g} s: generation hangs, or updates come "
                "faster than they can be loaded."
            )

    @property
    def _mine(self) -> _Staged | None:
        return getattr(self._own, "staged", None)

    def _under_way(self) -> _Staged:
        mine = self._mine
        if mine is None or mine is not self._staged:
            raise WeightError(
                "no update is under way in this thread: the first call needs chunk_start=True, and "
                f"an update is dropped when its next call does not come within {self._timeout_s:g} "
                "s, or when one of its calls fails. Send all of it again, from chunk_start=True on."
            )
        return mine

    def _restart_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        staged = self._staged

        def time_out() -> None:
            with self._guard:
                if staged is not None and self._staged is staged:
                    _log.error(
                        "an update of the models did not end within %g s and was dropped: they "
                        "keep their old weights",
                        self._timeout_s,
                    )
                    self._close_update()

        self._timer = threading.Timer(self._timeout_s, time_out)
        self._timer.daemon = True
        self._timer.start()

    def _close_update(self) -> None:
        if self._staged is not None:  # its thread may keep it for long
            self._staged.states, self._staged.loras = {}, {}
        self._staged = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.lock.release()
