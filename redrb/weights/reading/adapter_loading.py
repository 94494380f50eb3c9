"""Loads adapters: into a model's LoRA layers, or merged into its weights."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from redrb.errors import WeightMismatch
from redrb.weights.lora import LoraMerger
from redrb.weights.reading.state_copies import Adapter, FetchedVersion
from redrb.weights.reading.targets import LoadTarget
from redrb.weights.tensors.copying import load_in_place, synchronize
from redrb.weights.tensors.names import Target
from redrb.weights.tensors.shard import TensorShard


class AdapterLoader:
    """Loads adapters into one target, and keeps the base of each weight that it merged one into."""

    def __init__(self) -> None:
        self._mergers: dict[str, tuple[nn.Module, LoraMerger]] = {}

    def plan(
        self, target: Target, selection: LoadTarget, fetched: FetchedVersion
    ) -> Callable[[], None]:
        """Check an adapter; return a function that loads it, for use after the state is loaded.

        Raises:
            WeightMismatch: The adapter does not fit.
        """
        models = _models(target)
        if fetched.adapter is None:
            return lambda: self._forget(fetched)
        if not models:
            return _loading(selection, fetched.adapter)
        adapter = fetched.adapter
        planned = []
        for model, module in models.items():
            begin = f"{model}." if model else ""
            merger = self._merger(model, module)
            tensors = {
                name.removeprefix(begin): tensor
                for name, tensor in adapter.tensors.items()
                if name.startswith(begin)
            }
            configs = {
                layer.removeprefix(begin): config
                for layer, config in adapter.configs.items()
                if layer.startswith(begin)
            }
            if tensors:
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
            loaded = [entry.name for entry in fetched.state.layout.tensors]
            for model, (_, merger) in self._mergers.items():
                begin = f"{model}." if model else ""
                names = {name.removeprefix(begin) for name in loaded if name.startswith(begin)}
                merger.forget(names)

    def _merger(self, name: str, module: nn.Module) -> LoraMerger:
        known = self._mergers.get(name)
        if known is None or known[0] is not module:
            self._mergers[name] = known = (module, LoraMerger(module))
        return known[1]


def _models(target: Target) -> dict[str, nn.Module]:
    if isinstance(target, nn.Module):
        return {"": target}
    return {name: part for name, part in target.items() if isinstance(part, nn.Module)}


def _loading(selection: LoadTarget, adapter: Adapter) -> Callable[[], None]:
    """Return a function that loads A and B into a dict of tensors."""
    missing = [name for name in adapter.tensors if name not in selection.targets]
    if missing:  # whatever `strict` is: without A and B the dict would not hold this version
        raise WeightMismatch(
            f"the newest version is an adapter, and the dict has no {missing[0]!r}: give a module, "
            "into which it can be merged."
        )
    values = {n: t for n, t in adapter.tensors.items() if n in selection.targets}
    for name, value in values.items():
        shape = selection.targets[name].shape
        if tuple(value.shape) != shape:
            raise WeightMismatch(f"{name!r} is {list(value.shape)}, in the dict {list(shape)}.")

    def load() -> None:
        for name, value in values.items():
            target: TensorShard = selection.targets[name]
            load_in_place(target, value)
        synchronize(selection.targets[name] for name in values)

    return load
