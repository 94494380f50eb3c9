"""From a state's bytes to a reader's tensors: which are wanted, and how they get there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redrb.weights.tensors.copying import load_in_place, synchronize
from redrb.weights.tensors.dtypes import dtype_of
from redrb.weights.tensors.fitting import Strict, check_fits
from redrb.weights.tensors.shard import TensorShard
from redrb.weights.tensors.state import State
from redrb.weights.wire.layout import Layout, Piece, TensorEntry


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """What a reader loads.

    Attributes:
        targets: Its tensors, by name.
        strict: Which names have to agree.
    """

    targets: Mapping[str, TensorShard]
    strict: Strict

    def names(self, layout: Layout) -> list[str]:
        """Return the names to load.

        Raises:
            WeightMismatch: They do not fit.
        """
        return check_fits(layout, self.targets, strict=self.strict)

    def chunks(self, layout: Layout) -> frozenset[int]:
        """Return the chunks that hold what is wanted.

        Raises:
            WeightMismatch: Names, shapes or dtypes do not fit.
        """
        entries = {entry.name: entry for entry in layout.tensors}
        found: set[int] = set()
        for name in self.names(layout):
            for piece in entries[name].pieces:
                rows = _rows(piece, self.targets[name])
                if rows:
                    row = piece.elements // max(piece.shape[0], 1) if piece.shape else 1
                    width = row * entries[name].item_bytes
                    begin = piece.offset + rows.start * width
                    last = piece.offset + rows.stop * width - 1
                    size = layout.chunk_bytes
                    found.update(range(begin // size, last // size + 1))
        return frozenset(found)

    def live(self, layout: Layout) -> dict[str, Tensor]:
        """Return tensors that a state can be in: whole, of its dtype, with elements together.

        A cast would lose what a delta needs to be right: such tensors get a copy beside them.
        """
        found: dict[str, Tensor] = {}
        entries = {entry.name: entry for entry in layout.tensors}
        for name in self.names(layout):
            entry, target = entries[name], self.targets[name]
            tensor = target.tensor
            plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
            plain = plain and tensor.dtype == dtype_of(entry)
            if plain and target.is_whole and _is_whole(entry):
                found.setdefault(entry.alias or name, tensor)
        return found

    def load(self, state: State, *, adopt: bool = False) -> None:
        """Set all tensors that the state is not in already; the caller holds the lock.

        Args:
            state: From where.
            adopt: Put tensors into the state's memory, where they can be, instead of copying.
        """
        entries = {entry.name: entry for entry in state.layout.tensors}
        loaded = self.names(state.layout)
        for name in loaded:
            entry = entries[entries[name].alias or name]
            for piece in entry.pieces:
                with torch.inference_mode(mode=False):  # else parameters would become of that kind
                    value = state.value(entry, piece)
                if adopt and _can_be(self.targets[name], value):
                    self.targets[name].tensor.data = value
                elif not _same_memory(value, self.targets[name].tensor):
                    load_in_place(self.targets[name], value, piece.start)
        synchronize(self.targets[name] for name in loaded)


def named_tensors(state: State) -> list[tuple[str, Tensor]]:
    """Return all tensors of a state by name; those of one piece share its memory."""
    whole: dict[str, Tensor] = {}
    for entry in state.layout.tensors:
        if entry.alias is not None:
            whole[entry.name] = whole[entry.alias]
        else:
            whole[entry.name] = _whole(state, entry)
    return list(whole.items())


def _whole(state: State, entry: TensorEntry) -> Tensor:
    if _is_whole(entry):
        return state.value(entry, entry.pieces[0])
    parts: Sequence[tuple[Piece, Tensor]] = [
        (piece, state.value(entry, piece)) for piece in entry.pieces
    ]
    whole = TensorShard.whole(parts[0][1].new_empty(entry.shape))
    for piece, value in parts:
        load_in_place(whole, value, piece.start)
    return whole.tensor


def _is_whole(entry: TensorEntry) -> bool:
    return len(entry.pieces) == 1 and entry.pieces[0].shape == entry.shape


def _rows(piece: Piece, target: TensorShard) -> range:
    """Return which of the piece's first dimension holds something that the target has."""
    if not piece.elements:
        return range(0)
    box = zip(piece.start, piece.shape, target.start, target.tensor.shape, strict=True)
    overlaps = [
        range(max(first, own) - first, min(first + size, own + own_size) - first)
        for first, size, own, own_size in box
    ]
    if not all(overlaps):
        return range(0)
    return overlaps[0] if overlaps else range(1)


def _can_be(target: TensorShard, value: Tensor) -> bool:
    """Return whether a target's elements may be a value's from now on.

    Not where others have the same memory: processes, or the tensor that it is a part of.
    """
    tensor: Any = target.tensor
    return bool(
        target.is_whole
        and tensor.device.type == "cpu"
        and (tensor.dtype, tensor.shape) == (value.dtype, value.shape)
        and not (tensor.is_inference() or tensor.is_shared())
        and not (tensor._is_view() or tensor.grad_fn)  # noqa: SLF001
    )


def _same_memory(value: Tensor, target: Tensor) -> bool:
    return value.data_ptr() == target.data_ptr() and value.device == target.device
