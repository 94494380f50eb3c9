"""Loads adapters: into a model's LoRA layers, or merged into its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import nn

from redrb.errors import WeightMismatch
from redrb.weights.lora.merging import LoraMerger
from redrb.weights.reading.state_copies import Adapter, FetchedVersion
from redrb.weights.reading.targets import LoadTarget
from redrb.weights.tensors.shard import load_in_place, synchronize

T = TypeVar("T")


class AdapterLoader:
    """Loads adapters into one target, and keeps the base of each weight that it merged one into."""

    def __init__(self) -> None:
        self._mergers: dict[str, tuple[nn.Module, LoraMerger]] = {}

    def plan(self, selection: LoadTarget, fetched: FetchedVersion) -> Callable[[], None]:
        """Check an adapter; return a function that loads it, for use after the state is loaded."""
        models, adapter = selection.models, fetched.adapter
        if adapter is None:
            return lambda: self._forget(fetched)
        if not models:
            return _into_dict(selection, adapter)
        planned = []
        for model, module in models.items():
            known, merger = self._mergers.get(model, (None, None))
            if merger is None or known is not module:
                merger = LoraMerger(module)
                self._mergers[model] = module, merger
            tensors = _of_model(model, adapter.tensors)
            if tensors:
                configs = _of_model(model, adapter.configs)
                planned.append((merger, merger.plan(tensors, configs)))
        if not planned:
            raise WeightMismatch(f"the adapter has no layers of the models {', '.join(models)}.")

        def apply() -> None:
            self._forget(fetched)
            for merger, changes in planned:
                merger.apply(changes)

        return apply

    def _forget(self, fetched: FetchedVersion) -> None:
        """Take the weights that were just loaded as the new bases for adapters."""
        if fetched.state is not None:
            loaded = {entry.name: entry for entry in fetched.state.layout.tensors}
            for model, (_, merger) in self._mergers.items():
                merger.forget(_of_model(model, loaded))


def _of_model(model: str, named: Mapping[str, T]) -> dict[str, T]:
    """Return what belongs to a model, by the names that the model uses."""
    begin = f"{model}." if model else ""
    return {
        name.removeprefix(begin): value for name, value in named.items() if name.startswith(begin)
    }


def _into_dict(selection: LoadTarget, adapter: Adapter) -> Callable[[], None]:
    """Return a function that loads A and B into a dict of tensors."""
    targets = selection.targets
    for name, value in adapter.tensors.items():
        if name not in targets:  # whatever `strict` is: the dict would not hold this version
            raise WeightMismatch(
                f"the newest version is an adapter, and the dict has no {name!r}: give a module, "
                "into which it can be merged."
            )
        if tuple(value.shape) != targets[name].shape:
            shape = list(targets[name].shape)
            raise WeightMismatch(f"{name!r} is {list(value.shape)}, in the dict {shape}.")

    def load() -> None:
        for name, value in adapter.tensors.items():
            load_in_place(targets[name], value)
        synchronize(targets[name].tensor for name in adapter.tensors)

    return load
