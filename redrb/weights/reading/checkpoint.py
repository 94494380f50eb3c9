"""The tensors of a fetched version by the names that a checkpoint of the model has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from redrb.errors import ConfigError, WeightError, WeightMismatch
from redrb.weights.lora.merging import merged
from redrb.weights.lora.names import base_names, pairs
from redrb.weights.reading.state_copies import Adapter
from redrb.weights.reading.targets import named_tensors
from redrb.weights.tensors.state import StateBytes
from redrb.weights.wire.lora_config import LoraConfig
from redrb.weights.wire.manifest import WeightVersion


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One model's tensors of a version, by the names of the model without wrappers and LoRA.

    Attributes:
        stored: The published tensors, which share the memory of the state.
        changes: A, B and settings of the adapter that is merged into some of them.
    """

    stored: Mapping[str, Tensor]
    changes: Mapping[str, tuple[Tensor, Tensor, LoraConfig]]

    @classmethod
    def of(
        cls,
        described: WeightVersion,
        state: StateBytes | None,
        adapter: Adapter | None,
        prefix: str,
    ) -> Self:
        """Return the tensors whose published names begin with `prefix`.

        Raises:
            WeightError: The version is an adapter whose base is not published.
            WeightMismatch: It is an adapter of a weight that its base does not have.
            ConfigError: The version, or the adapter, has no tensors of this prefix.
        """
        if state is None:
            raise WeightError(
                f"version {described.version} of weights {described.name!r} is an adapter whose "
                "weights are not published: publish them too, with fully_update=True."
            )
        published = dict(named_tensors(state))
        own = {
            name.removeprefix(prefix): tensor
            for name, tensor in published.items()
            if name.startswith(prefix)
        }
        stored = {plain: own[name] for plain, name in base_names(own).items()}
        if not stored:
            raise ConfigError(
                f"weights {described.name!r} have no tensors that begin with {prefix!r}, but "
                f"{', '.join(sorted(published)[:3])}: give model= of EngineWeights the part before "
                'the first point, or model="" for names as the model has them.'
            )
        changes: dict[str, tuple[Tensor, Tensor, LoraConfig]] = {}
        mine = Adapter({}, {}) if adapter is None else adapter.of(prefix)
        for layer, (a, b) in pairs(mine.tensors).items():
            name = f"{layer}.weight"
            if name not in stored:
                raise WeightMismatch(
                    f"version {described.version} of weights {described.name!r} is an adapter of "
                    f"{name!r}, which the weights below it do not have."
                )
            changes[name] = a, b, mine.configs[layer]
        return cls(stored, changes)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor by its name; those that the adapter changes are merged one by one."""
        for name, tensor in self.stored.items():
            change = self.changes.get(name)
            yield name, tensor if change is None else merged(tensor, *change)
