"""From samples to addresses: where the elements of each tensor lie in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from redrb.codec import kernels
from redrb.codec.dtypes import BY_TORCH, FLOAT32, FLOAT64, DType
from redrb.codec.kernels import Cell, EncodedColumn
from redrb.codec.schema import FIELD_CODES
from redrb.codec.wire import MAX_COLUMNS, MAX_ELEMENTS, MAX_NAME_BYTES, MAX_RANK
from redrb.errors import EncodeError
from redrb.experience.padding import Shape
from redrb.experience.records import TENSOR_FIELDS, BufferItem, Experience, named_tensors


class Collected(NamedTuple):
    """The columns of one group.

    Attributes:
        columns: As the kernel takes them.
        held: The tensors whose memory the columns name, some of them made for it.
        versions: The tensors of `token_versions` that are there.
    """

    columns: list[EncodedColumn]
    held: list[Tensor]
    versions: list[Tensor]


class Collector:
    """Finds the memory of samples' tensors; wider floats are rounded to `narrow` where they fit."""

    def __init__(self, narrow: DType | None) -> None:
        self._narrow = narrow

    def items(self, group: Sequence[BufferItem]) -> Collected:
        """Return the columns of one group.

        Raises:
            RecordError: A field is no tensor.
            EncodeError: A tensor is none that the wire format can hold.
        """
        found = Collected([], [], [])
        self._add_all(found, group, TENSOR_FIELDS, FIELD_CODES)
        if any(item.tensors for item in group):
            named = [named_tensors(item) for item in group]
            names = further_names(name for row in named for name in row)
            self._add_all(found, named, tuple(names), {})
            check_columns(len(found.columns))
        return found

    def _add_all(
        self,
        found: Collected,
        rows: Sequence[BufferItem] | Sequence[dict[str, Tensor]],
        names: tuple[str, ...],
        keys: Mapping[str, int],
    ) -> None:
        """Append the columns of some fields, those that any row has."""
        quick = None
        if self._narrow is None:
            quick = kernels.kernel.collect(rows, names, Tensor, found.held)
        if quick is None:
            for name in names:
                self._add(found, keys.get(name, name), name, rows)
            return
        for name, (torch_dtype, cells) in zip(names, quick, strict=True):
            if torch_dtype is not None:
                code = dtype_of(name, torch_dtype).code
                found.columns.append((keys.get(name, name), code, -1, cells))
                if name == "token_versions":
                    found.versions.extend(_present(tensors_of(rows, name)))

    def _add(
        self,
        found: Collected,
        key: int | str,
        name: str,
        rows: Sequence[BufferItem] | Sequence[dict[str, Tensor]],
    ) -> None:
        """Append one column of any tensors, if any row has it."""
        tensors = tensors_of(rows, name)
        cells: list[Cell | None] = []
        plain: list[Tensor | None] = []
        for row, tensor in zip(rows, tensors, strict=True):
            if tensor is None:
                cells.append(None)
                plain.append(None)
                continue
            if isinstance(row, BufferItem):
                named_tensors(row)  # subclasses of Tensor are welcome, all else is not
            elements = plain_memory(name, tensor)
            check_shape(name, tuple(elements.shape))
            plain.append(elements)
            cells.append((elements.data_ptr(), elements.shape))
        present = _present(plain)
        found.held.extend(present)
        if not present:
            return
        dtypes = {tensor.dtype for tensor in present}
        if len(dtypes) > 1:
            raise dtypes_differ(name, present)
        dtype = dtype_of(name, dtypes.pop())
        if name == "token_versions":
            found.versions.extend(present)
        if self._narrow is not None and dtype.code in (FLOAT32, FLOAT64):
            found.columns.append(self._rounded(found, key, dtype, cells, plain))
        else:
            found.columns.append((key, dtype.code, -1, cells))

    def _rounded(
        self,
        found: Collected,
        key: int | str,
        dtype: DType,
        cells: list[Cell | None],
        tensors: list[Tensor | None],
    ) -> EncodedColumn:
        """Return a column of floats with their rounded twins, unless a finite one does not fit."""
        narrow = self._narrow
        assert narrow is not None  # noqa: S101
        twins: list[Cell | None] = []
        made = []
        for cell, tensor in zip(cells, tensors, strict=True):
            if cell is None or tensor is None:
                twins.append(None)
                continue
            twin = rounded(tensor, narrow)
            if bool((twin.isinf() & ~tensor.isinf()).any()):
                return (key, dtype.code, -1, cells)
            made.append(twin)
            twins.append((cell[0], cell[1], twin.data_ptr()))
        found.held.extend(made)
        return (key, dtype.code, narrow.code, twins)


def collect_rows(experience: Experience, size: int, narrow: DType | None) -> Iterator[Collected]:
    """Yield the columns of each row of a batch, each a group of one sample.

    Raises:
        RecordError: A field is no tensor.
        EncodeError: A tensor is none that the wire format can hold.
    """
    named = named_tensors(experience)
    names = [name for name in TENSOR_FIELDS if name in named] + further_names(named)
    check_columns(len(names))
    columns = [_RowColumn(name, named[name], narrow) for name in names]
    versions = named.get("token_versions")
    for row in range(size):
        tokens = [] if versions is None else [versions[row]]
        yield Collected([column.row(row) for column in columns], [], tokens)


class _RowColumn:
    """One field of a batch, in one piece of memory."""

    def __init__(self, name: str, tensor: Tensor, narrow: DType | None) -> None:
        self._key = FIELD_CODES.get(name, name)
        self._tensor = plain_memory(name, tensor)
        dtype = dtype_of(name, tensor.dtype)
        self._code = dtype.code
        self._shape = tuple(tensor.shape[1:])
        check_shape(name, self._shape)
        self._start, self._step = self._tensor.data_ptr(), _row_bytes(self._tensor)
        self._narrow = narrow if dtype.code in (FLOAT32, FLOAT64) else None
        if self._narrow is not None:
            self._twin = rounded(self._tensor, self._narrow)
            lost = self._twin.isinf() & ~self._tensor.isinf()
            self._lost = lost.reshape(len(lost), -1).any(1).tolist()

    def row(self, row: int) -> EncodedColumn:
        """Return one row as the column of a group."""
        at = self._start + row * self._step
        if self._narrow is None or self._lost[row]:
            return (self._key, self._code, -1, [(at, self._shape)])
        twin = self._twin.data_ptr() + row * _row_bytes(self._twin)
        return (self._key, self._code, self._narrow.code, [(at, self._shape, twin)])


def _row_bytes(tensor: Tensor) -> int:
    return tensor[0].numel() * tensor.element_size()


def tensors_of(
    rows: Sequence[BufferItem] | Sequence[dict[str, Tensor]], name: str
) -> list[Tensor | None]:
    """Return one field of each row."""
    return [row.get(name) if isinstance(row, dict) else getattr(row, name) for row in rows]


def _present(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def plain_memory(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor's elements in one contiguous tensor on the CPU, without its history."""
    try:
        plain = tensor.detach().cpu().resolve_neg().contiguous()
        plain.data_ptr()
    except RuntimeError as error:
        raise EncodeError(f"{name} cannot be read as plain memory: {error}") from error
    return plain


def rounded(tensor: Tensor, narrow: DType) -> Tensor:
    """Return floats in a narrower dtype; every nan has the same bits, however torch converts."""
    twin = tensor.to(narrow.tensor)
    nan = tensor.isnan()
    return twin.masked_fill(nan, math.nan) if bool(nan.any()) else twin


def dtype_of(name: str, dtype: torch.dtype) -> DType:
    """Return the wire's dtype, or raise EncodeError where it has none."""
    known = BY_TORCH.get(dtype)
    if known is None:
        raise EncodeError(
            f"{name} is {dtype}, which the wire format does not have: convert it first."
        )
    return known


def dtypes_differ(name: str, tensors: Sequence[Tensor]) -> EncodeError:
    """Return the error for one group whose samples differ in a field's dtype."""
    dtypes = sorted({str(tensor.dtype) for tensor in tensors})
    return EncodeError(
        f"{name} is {' and '.join(dtypes)} within one group: "
        "convert its samples to one dtype before putting them."
    )


def check_shape(name: str, shape: Shape) -> None:
    """Raise EncodeError where the wire format cannot hold a shape."""
    elements = 1
    for size in shape:
        elements *= size or 1
    if len(shape) > MAX_RANK or elements > MAX_ELEMENTS:
        raise EncodeError(
            f"{name} has shape {list(shape)}: at most {MAX_RANK} dimensions and "
            f"{MAX_ELEMENTS} elements can be stored."
        )


def check_shapes(columns: Sequence[EncodedColumn]) -> None:
    """Raise EncodeError for the first shape that the wire format cannot hold."""
    for key, _, _, cells in columns:
        for cell in cells:
            if cell is not None:
                name = TENSOR_FIELDS[key] if isinstance(key, int) else key
                check_shape(name, tuple(cell[1]))


def check_columns(count: int) -> None:
    """Raise EncodeError where a group has more columns than the wire format allows."""
    if count > MAX_COLUMNS:
        raise EncodeError(f"{count} tensors a sample are more than {MAX_COLUMNS}.")


def further_names(names: Iterable[str]) -> list[str]:
    """Return the names of further tensors, sorted, or raise EncodeError where one is unusable."""
    further = set(names) - set(TENSOR_FIELDS)
    for name in further:
        check_text(name, MAX_NAME_BYTES, "a name in `tensors`")
    return sorted(further)


def check_text(text: str, limit: int, what: str) -> None:
    """Raise EncodeError unless `text` is a str of at most `limit` bytes of UTF-8."""
    if not isinstance(text, str):
        raise EncodeError(f"{what} is a {type(text).__name__}, not a str: {text!r}.")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise EncodeError(f"{what} is not valid Unicode: {text!r}.") from error
    if size > limit:
        raise EncodeError(f"{what} has {size} bytes, the limit is {limit}: {text[:40]!r}...")
