"""Adapters into a reader's models: into their LoRA layers, or merged into their weights."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from redrb.errors import WeightMismatch
from redrb.weights.lora import LoraMerger
from redrb.weights.reading.load_target import LoadTarget
from redrb.weights.reading.state_copies import Adapter, FetchedVersion
from redrb.weights.tensors.copying import load_in_place, synchronize
from redrb.weights.tensors.names import Target
from redrb.weights.tensors.shard import TensorShard


class AdapterLoader:
    """Brings adapters into one target; remembers the weights that it merged them into."""

    def __init__(self) -> None:
        self._mergers: dict[str, tuple[nn.Module, LoraMerger]] = {}

    def plan(
        self, target: Target, wanted: LoadTarget, current: FetchedVersion
    ) -> Callable[[], None]:
        """Check what is to be loaded, and return what does it, after the state was loaded.

        Raises:
            WeightMismatch: The adapter does not fit.
        """
        models = _models(target)
        if current.adapter is None:
            return lambda: self._forget(current)
        if not models:
            return _loading(wanted, current.adapter)
        adapter = current.adapter
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
            raise WeightMismatch(f"the adapter has no layers of {', '.join(models)}.")

        def apply() -> None:
            self._forget(current)
            for merger, changes in planned:
                merger.apply(changes)

        return apply

    def _forget(self, current: FetchedVersion) -> None:
        """Take weights that were just loaded as those that adapters are merged into."""
        if current.state is not None:
            loaded = [entry.name for entry in current.state.layout.tensors]
            for model, (_, merger) in self._mergers.items():
                begin = f"{model}." if model else ""
                own = {name.removeprefix(begin) for name in loaded if name.startswith(begin)}
                merger.forget(own)

    def _merger(self, name: str, module: nn.Module) -> LoraMerger:
        known = self._mergers.get(name)
        if known is None or known[0] is not module:
            self._mergers[name] = known = (module, LoraMerger(module))
        return known[1]


def _models(target: Target) -> dict[str, nn.Module]:
    if isinstance(target, nn.Module):
        return {"": target}
    return {name: part for name, part in target.items() if isinstance(part, nn.Module)}


def _loading(wanted: LoadTarget, adapter: Adapter) -> Callable[[], None]:
    """Return what loads A and B into a dict that has them by name."""
    missing = [name for name in adapter.tensors if name not in wanted.targets]
    if missing:  # whatever `strict` says: without them it would not be this version
        raise WeightMismatch(
            f"the newest version is an adapter, and the dict has no {missing[0]!r}: give a module, "
            "so that it can be merged."
        )
    values = {n: t for n, t in adapter.tensors.items() if n in wanted.targets}
    for name, value in values.items():
        if tuple(value.shape) != wanted.targets[name].shape:
            raise WeightMismatch(
                f"{name!r} is {list(value.shape)}, in the dict {list(wanted.targets[name].shape)}."
            )

    def load() -> None:
        for name, value in values.items():
            target: TensorShard = wanted.targets[name]
            load_in_place(target, value, (0,) * value.dim())
        synchronize(wanted.targets[name] for name in values)

    return load
