"""`Rows`: rows that were read from a table; columns are decoded when they are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from redrb.codec import kernels
from redrb.codec.dtypes import DTYPES
from redrb.codec.plain.cells import ARRAY, TENSOR
from redrb.codec.wire import batch_limit
from redrb.errors import RecordError
from redrb.experience.padding import check_side
from redrb.experience.records import Side
from redrb.table.values import Values, shaped

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class _Joined:
    """The tensors or arrays of a column, which have one dtype, in one buffer."""

    kind: int
    flat: Any
    shapes: list[tuple[int, ...]]


_Ragged: TypeAlias = "tuple[torch.Tensor, dict[str, torch.Tensor]]"
"""Offsets of a nested tensor; its extreme lengths, which torch would ask a device for later."""


class Cells(NamedTuple):
    """A column as it is stored.

    Attributes:
        parts: Where the value of each row lies.
        begins, lengths: The part of it that is the value.
    """

    parts: tuple[bytes, ...]
    begins: tuple[int, ...]
    lengths: tuple[int, ...]


class Rows(Mapping[str, list[Any]]):
    """Some columns of some rows: `rows["tokens"][i]` is the value of the row `rows.row_keys[i]`.

    Tensors and arrays of a column share one buffer, which belongs to these rows alone.

    Attributes:
        row_keys: Keys of the rows, in the order in which they were asked for.
    """

    def __init__(
        self,
        row_keys: tuple[str, ...],
        columns: Mapping[str, Cells],
        values: Values,
    ) -> None:
        self.row_keys = row_keys
        self._columns = columns
        self._values = values
        self._decoded: dict[str, list[Any]] = {}
        # columns of the same lengths share their offsets, so that torch computes with both
        self._ragged: dict[tuple[int, ...], _Ragged] = {}

    def __getitem__(self, name: str) -> list[Any]:
        if name not in self._decoded:
            joined = self._joined(name)
            self._decoded[name] = (
                [
                    self._values.decode(name, key, memoryview(part)[begin : begin + length])
                    for key, part, begin, length in zip(
                        self.row_keys, *self._columns[name], strict=True
                    )
                ]
                if joined is None
                else _parts(joined)
            )
        return self._decoded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """Return the number of columns."""
        return len(self._columns)

    def __repr__(self) -> str:
        return f"<redrb.Rows {len(self.row_keys)} rows, columns {', '.join(self)}>"

    def stacked(self, name: str) -> Any:
        """Return a column as one tensor `[rows, ...]` or array.

        Tensors that differ in one dimension alone become a nested tensor with the layout
        `torch.jagged`; other values are returned as the list that `rows[name]` is.
        """
        joined = self._joined(name)
        if joined is None:
            return self[name]
        count, first = len(joined.shapes), joined.shapes[0]
        if joined.shapes.count(first) == count:
            return joined.flat.reshape((count, *first))
        if joined.kind == ARRAY or len(set(map(len, joined.shapes))) > 1:
            return self[name]
        sizes = zip(*joined.shapes, strict=True)
        ragged = [dim for dim, of_rows in enumerate(sizes) if len(set(of_rows)) > 1]
        return self[name] if len(ragged) > 1 else _jagged(joined, ragged[0], self._ragged)

    def batch(
        self, side: Side = "left", device: str = "cpu", *, pin_memory: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return the columns of tensors, each zero-padded to `[rows, longest, ...]`.

        Args:
            side: Where the padding of the first dimension goes; other dimensions are padded at
                their end.

        Raises:
            RecordError: A column holds other values than tensors of one dtype and rank, or the side
                is another.
        """
        check_side(side)
        found = {}
        for name in self:
            joined = self._joined(name)
            if joined is None:
                self[name]  # says what is wrong with a damaged value
            ranks = {len(shape) for shape in joined.shapes} if joined else set()
            if joined is None or joined.kind != TENSOR or len(ranks) != 1:
                raise RecordError(
                    f"column {name!r} holds no tensors of one dtype and rank, so there is no batch "
                    "of it: name the columns of the batch, or use get()."
                )
            shape = [max(sizes) for sizes in zip(*joined.shapes, strict=True)]
            padded = self._zeros(joined, shape, pin_memory=pin_memory)
            for row, part in enumerate(_parts(joined)):
                place = [slice(0, size) for size in part.shape]
                if place and side == "left":
                    place[0] = slice(shape[0] - part.shape[0], shape[0])
                padded[row][tuple(place)] = part
            found[name] = padded if device == "cpu" else padded.to(device, non_blocking=pin_memory)
        return found

    def _zeros(self, joined: _Joined, shape: list[int], *, pin_memory: bool) -> torch.Tensor:
        import torch

        elements = len(joined.shapes)
        for size in shape:
            elements *= size
        dtype = joined.flat.dtype
        stored = len(joined.flat) * dtype.itemsize
        if elements * dtype.itemsize > batch_limit(stored):
            raise RecordError(
                f"a batch of {len(joined.shapes)} rows padded to {tuple(shape)} is too large: take "
                "fewer rows, or rows of similar lengths."
            )
        return torch.zeros((len(joined.shapes), *shape), dtype=dtype, pin_memory=pin_memory)

    def _joined(self, name: str) -> _Joined | None:
        """Return a column's elements in one buffer; None unless all have one kind and dtype."""
        joined = kernels.kernel.gather(*self._columns[name])
        if joined is None:
            return None
        kind, code, buffer, shapes = joined
        import numpy as np

        flat = np.frombuffer(buffer, DTYPES[code].storage)
        return _Joined(kind, shaped(kind, code, flat, flat.shape), shapes)


def _jagged(joined: _Joined, dim: int, known: dict[tuple[int, ...], _Ragged]) -> torch.Tensor:
    """Return tensors that differ in one dimension as a nested tensor with layout `torch.jagged`.

    It is what `torch.nested.as_nested_tensor` returns, which takes three times as long, as it
    makes a view that autograd knows.

    Args:
        known: What columns of the same lengths share.
    """
    import torch
    from torch.nested._internal.nested_tensor import NestedTensor

    lengths = tuple([shape[dim] for shape in joined.shapes])
    if dim:
        values = torch.cat(_parts(joined), dim)
    else:
        inner = joined.shapes[0][1:]
        values = joined.flat.reshape((sum(lengths), *inner)) if inner else joined.flat
    if lengths not in known:
        extremes = {"min_seqlen": min(lengths), "max_seqlen": max(lengths)}
        known[lengths] = (
            torch.tensor([0, *accumulate(lengths)]),
            {name: torch.zeros((length, 0)) for name, length in extremes.items()},
        )
    offsets, extremes_of_it = known[lengths]
    nested: torch.Tensor = NestedTensor(
        values, offsets, _ragged_idx=dim + 1, _metadata_cache=dict(extremes_of_it)
    )
    return nested


def _parts(joined: _Joined) -> list[Any]:
    sizes = []
    for shape in joined.shapes:
        size = 1
        for each in shape:
            size *= each
        sizes.append(size)
    if joined.kind == TENSOR:
        flat = joined.flat.split(sizes)
    else:
        import numpy as np

        flat = np.split(joined.flat, np.cumsum(sizes)[:-1])
    return [
        part if len(shape) == 1 else part.reshape(shape)
        for part, shape in zip(flat, joined.shapes, strict=True)
    ]
