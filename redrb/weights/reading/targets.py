"""The tensors that a reader loads, and copying a state's bytes into them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from redrb.weights.tensors.dtypes import dtype_of
from redrb.weights.tensors.fitting import Strict, check_fits, checked_strict, target_shards
from redrb.weights.tensors.names import Target
from redrb.weights.tensors.state import StateBytes, TensorShard, load_in_place, synchronize
from redrb.weights.wire.layout import Layout


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The tensors that a reader loads weights into.

    Attributes:
        strict: Which names must be on both sides, see `Strict`.
        target: The model, models or dict that has them.
    """

    targets: Mapping[str, TensorShard]
    strict: Strict
    target: Target = field(default_factory=dict)

    @classmethod
    def of(cls, target: Target, strict: object) -> Self:
        """Return the tensors that `target` has now, or raise ConfigError."""
        return cls(target_shards(target), checked_strict(strict), target)

    @property
    def models(self) -> dict[str, nn.Module]:
        """The modules of the target by name; that of a module alone is ""."""
        if isinstance(self.target, nn.Module):
            return {"": self.target}
        return {name: part for name, part in self.target.items() if isinstance(part, nn.Module)}

    def names(self, layout: Layout) -> list[str]:
        """Return the names to load, or raise WeightMismatch."""
        return check_fits(layout, self.targets, strict=self.strict)

    def chunks(self, layout: Layout) -> frozenset[int]:
        """Return the chunks that hold bytes of the targets, or raise WeightMismatch."""
        entries = {entry.name: entry for entry in layout.tensors}
        found: set[int] = set()
        for name in self.names(layout):
            entry = entries[name]
            target = self.targets[name]
            if not entry.elements or not target.tensor.numel():
                continue
            first, rows, width = 0, 1, entry.nbytes
            if entry.shape:
                first, rows = target.start[0], target.tensor.shape[0]
                width //= entry.shape[0]
            begin = entry.offset + first * width
            size = layout.chunk_bytes
            found.update(range(begin // size, (begin + rows * width - 1) // size + 1))
        return frozenset(found)

    def live(self, layout: Layout) -> dict[str, Tensor]:
        """Return the targets that can hold the state itself: whole, contiguous, of its dtype.

        A cast loses bits that a delta needs, so the state of other targets is kept beside them.
        """
        found: dict[str, Tensor] = {}
        entries = {entry.name: entry for entry in layout.tensors}
        for name in self.names(layout):
            entry, target = entries[name], self.targets[name]
            tensor = target.tensor
            plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
            plain = plain and tensor.dtype == dtype_of(entry)
            if plain and target.is_whole:
                found.setdefault(entry.alias or name, tensor)
        return found

    def load(self, state: StateBytes, *, adopt: bool = False) -> None:
        """Set all targets that do not hold the state already; the caller holds the lock."""
        all_modules = isinstance(self.target, nn.Module) or len(self.models) == len(self.target)
        entries = {entry.name: entry for entry in state.layout.tensors}
        loaded = self.names(state.layout)
        with torch.inference_mode(mode=False):  # inference tensors must not become parameters' data
            values = [
                (self.targets[name], state.value(entries[entries[name].alias or name]))
                for name in loaded
            ]
        for target, value in values:
            if adopt and all_modules and _can_adopt(target, value):
                target.tensor.data = value
            elif (
                value.data_ptr() != target.tensor.data_ptr() or value.device != target.tensor.device
            ):
                load_in_place(target, value)
        synchronize(self.targets[name].tensor for name in loaded)


def named_tensors(state: StateBytes) -> list[tuple[str, Tensor]]:
    """Return all tensors of a state by name, which share its memory."""
    found: dict[str, Tensor] = {}
    for entry in state.layout.tensors:
        found[entry.name] = found[entry.alias] if entry.alias else state.value(entry)
    return list(found.items())


def _can_adopt(target: TensorShard, value: Tensor) -> bool:
    """Whether a target may use a value's memory from now on.

    It may not if other processes, or the tensor that it is a view of, use its present memory.
    """
    tensor: Any = target.tensor
    return bool(
        target.is_whole
        and tensor.device.type == "cpu"
        and (tensor.dtype, tensor.shape) == (value.dtype, value.shape)
        and not (tensor.is_inference() or tensor.untyped_storage().is_shared())
        and not (tensor._is_view() or tensor.grad_fn)  # noqa: SLF001
    )
