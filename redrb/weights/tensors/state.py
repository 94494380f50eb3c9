"""The bytes of a state, chunk by chunk, in live tensors or in private memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from redrb.errors import WeightError
from redrb.weights.tensors.dtypes import dtype_of
from redrb.weights.wire.delta import Bytes, Run
from redrb.weights.wire.layout import Layout, Span, TensorEntry, runs_of


@dataclass(frozen=True, slots=True, eq=False)
class TensorShard:
    """A box of a larger tensor: the whole tensor, or the part of a `DTensor` that one rank has.

    Attributes:
        tensor: The elements from `start` to `start + tensor.shape`.
        shape: Shape of the whole tensor.
        start: Index of the first element in the whole tensor.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> TensorShard:
        """Return the shard that is the whole tensor."""
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.dim())

    @property
    def is_whole(self) -> bool:
        """Whether the shard is the whole tensor."""
        return tuple(self.tensor.shape) == self.shape


def is_dtensor(value: object) -> bool:
    """Whether a value is a `DTensor`, without importing torch.distributed."""
    return hasattr(value, "full_tensor") and hasattr(value, "placements")


def local_shard(value: Any) -> TensorShard:
    """Return the part of a `DTensor` that this rank holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, start = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    return TensorShard(value.to_local(), tuple(value.shape), tuple(start))


def plain(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor; the same tensor if it is contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def flat_view(tensor: Tensor) -> Bytes:
    """Return a view of the bytes of a contiguous CPU tensor."""
    view: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return view


def load_in_place(target: TensorShard, value: Tensor) -> None:
    """Copy a tensor, or the box of it that the target holds; `check_fits` was called before."""
    live = target.tensor
    with torch.inference_mode(live.is_inference()), torch.no_grad():
        if not target.is_whole:
            box = zip(target.start, live.shape, strict=True)
            live.copy_(value[tuple(slice(at, at + size) for at, size in box)])
            return
        ordinary = live.is_contiguous() and not (live.is_conj() or live.is_neg())
        if live.device.type != "cpu" or live.dtype != value.dtype or not ordinary:
            live.copy_(value)
            return
        # not copy_: on busy cores the barrier of torch's threads takes 20 times as long as the copy
        flat_view(live)[:] = flat_view(value)
        if not live.is_inference():
            increment_version(live)


def synchronize(tensors: Iterable[Tensor]) -> None:
    """Wait for copies and casts that are under way on accelerators: others use other streams."""
    for device in {tensor.device for tensor in tensors}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


class StateBytes:
    """Reads and writes a state's chunks in live tensors, in private memory, or in both.

    Live tensors may be on any device and have another dtype than the state: float16, bfloat16,
    float32 and float64 are cast. Chunks of live tensors on the CPU are views if no cast is needed.
    All other tensors are in one block of memory, at the places of the layout; pages of it that
    nobody writes to use no memory.

    Attributes:
        memory: The block for tensors that are not live, None if all are live.
    """

    def __init__(
        self,
        layout: Layout,
        live: Mapping[str, Tensor] | None = None,
        *,
        memory: Bytes | None = None,
    ) -> None:
        """Combine live tensors and memory into a state, or raise WeightError.

        Args:
            live: Whole contiguous tensors by name; of tied tensors the first.
            memory: `layout.nbytes` bytes for tensors that are not live; default: new memory.
        """
        self.layout = layout
        self._owners = layout.owners()
        self._numbers = {entry.name: number for number, entry in enumerate(self._owners)}
        self._live: dict[int, Tensor] = {}
        self._plain: dict[int, Bytes] = {}
        for number, entry in enumerate(self._owners):
            tensor = (live or {}).get(entry.name)
            if tensor is not None:
                self._live[number] = tensor.detach().reshape(-1)
                if tensor.device.type == "cpu" and tensor.dtype == dtype_of(entry):
                    self._plain[number] = flat_view(tensor)
        self.memory = memory
        if memory is None and len(self._live) < len(self._owners):
            self.memory = _allocate(layout.nbytes)
        self._scratch = threading.local()
        self._written: set[int] = set()

    def segments(self, index: int) -> list[Bytes] | None:
        """Return the parts of memory that make up a chunk; None if a cast is needed."""
        spans = self._spans[index]
        size = self.layout.size(index)
        if self.memory is not None and not any(span.owner in self._live for span in spans):
            begin = index * self.layout.chunk_bytes
            return [self.memory[begin : begin + size]]
        if any(span.owner in self._live and span.owner not in self._plain for span in spans):
            return None
        found: list[Bytes] = []
        end = 0
        for span in spans:
            if span.in_chunk > end:
                found.append(np.zeros(span.in_chunk - end, np.uint8))
            found.append(self._bytes(index, span))
            end = span.in_chunk + span.nbytes
        if size > end:
            found.append(np.zeros(size - end, np.uint8))
        return found

    def read(self, index: int, scratch: Bytes | None = None) -> Bytes:
        """Return the bytes of a chunk: a view if they are contiguous, else a copy in `scratch`.

        Without `scratch` the copy is in memory that the next call of this thread overwrites.
        """
        segments = self.segments(index)
        if segments is not None and len(segments) == 1:
            return segments[0]
        if scratch is None:
            scratch = getattr(self._scratch, "chunk", None)
        if scratch is None:
            scratch = self._scratch.chunk = np.empty(self.layout.chunk_bytes, np.uint8)
        chunk = scratch[: self.layout.size(index)]
        end = 0
        for span in self._spans[index]:
            chunk[end : span.in_chunk] = 0
            end = span.in_chunk + span.nbytes
            chunk[span.in_chunk : end] = self._bytes(index, span)
        chunk[end:] = 0
        return chunk

    def head(self, index: int, nbytes: int) -> list[Bytes]:
        """Return what tensors have of the first bytes of a chunk, a multiple of 64 of them."""
        found: list[Bytes] = []
        for span in self._spans[index]:
            left = nbytes - span.in_chunk
            if left <= 0:
                break
            part = span if span.nbytes <= left else replace(span, nbytes=left)
            found.append(self._bytes(index, part))
        return found

    def write(self, index: int, data: Bytes) -> None:
        """Set the bytes of a chunk; `data` may be the view that `read` returned."""
        for span in self._spans[index]:
            part = data[span.in_chunk : span.in_chunk + span.nbytes]
            if span.owner not in self._live or span.owner in self._plain:
                place = self._bytes(index, span)
                if place.ctypes.data != part.ctypes.data:
                    place[:] = part
            else:
                entry = self._owners[span.owner]
                begin, end = _elements(span, entry)
                value = torch.from_numpy(part.copy()).view(dtype_of(entry))
                live = self._live[span.owner]
                with torch.inference_mode(live.is_inference()), torch.no_grad():
                    live[begin:end].copy_(value)
        self.touched(index)

    def touched(self, index: int) -> None:
        """Note that the caller has written to a chunk's segments."""
        self._written.update(span.owner for span in self._spans[index])

    def finish(self) -> None:
        """Tell autograd which live tensors were written; wait for casts on accelerators."""
        written = [self._live[number] for number in self._written & self._live.keys()]
        for tensor in written:
            if not tensor.is_inference():
                increment_version(tensor)
        synchronize(written)
        self._written.clear()

    def value(self, entry: TensorEntry) -> Tensor:
        """Return a tensor, not a tied one, that shares memory with the state."""
        live = self._live.get(self._numbers[entry.name])
        if live is not None:
            return live.reshape(entry.shape)
        if not entry.elements:
            return torch.empty(entry.shape, dtype=dtype_of(entry))
        if self.memory is None:
            raise WeightError("this state has no memory beside its live tensors.")
        flat = torch.from_numpy(self.memory[entry.offset : entry.offset + entry.nbytes])
        return flat.view(dtype_of(entry)).reshape(entry.shape)

    def runs(self, index: int) -> list[Run]:
        """Return the runs of items of equal width in a chunk."""
        return runs_of(self._spans[index])

    @cached_property
    def _spans(self) -> list[list[Span]]:
        # made at the first use: readers of a host's copy need whole tensors only
        return self.layout.spans()

    def _bytes(self, index: int, span: Span) -> Bytes:
        plain = self._plain.get(span.owner)
        if plain is not None:
            return plain[span.in_tensor : span.in_tensor + span.nbytes]
        live = self._live.get(span.owner)
        if live is not None:
            entry = self._owners[span.owner]
            begin, end = _elements(span, entry)
            return flat_view(live[begin:end].to(dtype_of(entry)).cpu())
        if self.memory is None:
            raise WeightError("this state has no memory beside its live tensors.")
        begin = index * self.layout.chunk_bytes + span.in_chunk
        return self.memory[begin : begin + span.nbytes]


def _elements(span: Span, entry: TensorEntry) -> tuple[int, int]:
    return span.in_tensor // entry.item_bytes, (span.in_tensor + span.nbytes) // entry.item_bytes


def _allocate(nbytes: int) -> Bytes:
    try:
        return np.zeros(nbytes, np.uint8)  # zeros, not empty: pages use memory only after a write
    except MemoryError as error:
        raise WeightError(f"not enough memory for weights of {nbytes} bytes.") from error
