"""Updates of a maker's models from its own process, in one call or in coati's chunks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from redrb.errors import WeightError, WeightMismatch
from redrb.train.following import LockedModels
from redrb.weights.lora.merging import LoraMerger
from redrb.weights.tensors.names import module_tensors

_log = logging.getLogger("redrb")


@dataclass(slots=True, eq=False)
class _Received:
    """The chunks of an update so far, by model."""

    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    loras: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = field(default_factory=dict)
    dropped: bool = False


class ChunkedUpdates:
    """Updates of models, each of which is loaded as a whole.

    The chunks of an update are collected beside the models, and loaded under their lock at its end.
    All of them must come from the thread that began the update.
    """

    def __init__(self, models: LockedModels) -> None:
        self._models, self._loads = models, models.loads
        self._mergers = {name: LoraMerger(model) for name, model in models.models.items()}
        self._own = threading.local()  # `received`: the update that this thread has begun

    def update(
        self,
        states: Mapping[str, Mapping[str, Tensor] | None],
        lora_configs: Mapping[str, Mapping[str, Any] | None],
        *,
        first: bool,
        last: bool,
    ) -> bool:
        """Update the models, in one call or in chunks; returns whether the update has ended.

        A call with neither `first` nor `last` is a chunk of the update that this thread has begun;
        if there is none, it is a whole update. After a call that failed the other calls of its
        update are refused.

        Args:
            lora_configs: For tensors of LoRA: settings by layer, by model; None for full weights.

        Raises:
            WeightError: This thread has no update under way, or makes experience just now; or there
                is no such model.
            WeightMismatch: A tensor does not fit the models, which keep their old weights.
        """
        received: _Received | None = getattr(self._own, "received", None)
        ends = last or (received is None and not first)
        if first and received is not None and not received.dropped:
            _log.warning("an update of the models was not ended, and another one begins")
        if first or (received is None and not last):
            received = _Received()
        self._own.received = None if ends else received
        if received is None or received.dropped:
            raise WeightError(
                "no update is under way in this thread: the first call needs chunk_start=True, and "
                "an update is dropped when one of its calls fails. Send all of it again, from "
                "chunk_start=True on."
            )
        try:
            for model, state in states.items():
                if state is not None:
                    self._receive(received, model, state, lora_configs[model])
            if ends:
                with self._models.exclusive():
                    self._load(received)
        except BaseException:
            received.dropped = True
            received.states, received.loras = {}, {}
            raise
        return ends

    def _receive(
        self,
        received: _Received,
        model: str,
        state: Mapping[str, Tensor],
        lora_configs: Mapping[str, Any] | None,
    ) -> None:
        if model not in self._models.models:
            raise WeightError(f"this maker has no {model}; it has {sorted(self._models.models)}.")
        copied = {name: tensor.detach().clone() for name, tensor in state.items()}
        if lora_configs is None:
            received.states.setdefault(model, {}).update(copied)
        else:
            tensors, configs = received.loras.setdefault(model, ({}, {}))
            tensors.update(copied)
            configs.update(lora_configs)

    @torch.no_grad()
    def _load(self, received: _Received) -> None:
        """Load the weights that the models have, and LoRA products, after all were checked."""
        if self._loads != self._models.loads:  # later LoRA products are merged into the new weights
            self._loads = self._models.loads
            for merger in self._mergers.values():
                merger.forget()
        planned: list[Callable[[], object]] = []
        for model, state in received.states.items():
            live = module_tensors(self._models.models[model])
            for name, tensor in state.items():
                if name in live and tensor.shape != live[name].shape:
                    raise WeightMismatch(
                        f"{model}.{name} is {list(tensor.shape)} in the update and "
                        f"{list(live[name].shape)} in the model. Nothing was loaded."
                    )
                if name in live:
                    planned.append(partial(live[name].copy_, tensor))
        for model, (tensors, configs) in received.loras.items():
            merger = self._mergers[model]
            planned.append(partial(merger.apply, merger.plan(tensors, configs)))
        for change in planned:
            change()
        for model in received.states:
            self._mergers[model].forget()
