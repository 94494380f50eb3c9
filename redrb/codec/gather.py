"""Gathers the tensors of samples into one `Column` a field, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from redrb.codec.columns import Column
from redrb.codec.wire import BY_TORCH, MAX_COLUMNS, MAX_ELEMENTS, MAX_NAME_BYTES, MAX_RANK, DType
from redrb.errors import EncodeError
from redrb.experience.padding import Shape
from redrb.experience.records import TENSOR_FIELDS, BufferItem, Experience, named_tensors

_FIELDS = [(name, attrgetter(name)) for name in TENSOR_FIELDS]
_get_dtype = attrgetter("dtype")
_PLAIN = ({Tensor}, {type(None)})


@torch.no_grad()
def gather_items(items: Sequence[BufferItem]) -> list[Column] | None:
    """Return every field that some sample has; None if a field's dtypes differ among samples.

    Raises:
        RecordError: A field is no tensor.
        EncodeError: The wire format cannot hold a tensor.
    """
    columns: list[Column] = []
    for name, tensors in _tensors_by_name(items):
        column = _alike(name, tensors)
        if column is not None:
            columns.append(column)
            continue
        present = [tensor for tensor in tensors if tensor is not None]
        if not present:
            continue
        dtypes = [tensor.dtype for tensor in present]
        if dtypes.count(dtypes[0]) != len(dtypes):
            return None
        columns.append(_column(name, tensors, present))
    _check_names(columns)
    return columns


@torch.no_grad()
def gather_batch(experience: Experience) -> list[Column]:
    """Return the fields of a batch; each row is a sample.

    Raises:
        RecordError: A field is no tensor.
        EncodeError: The wire format cannot hold a tensor.
    """
    columns = []
    for name, tensor in _sorted_fields(named_tensors(experience)):
        shape = _checked_shape(name, tuple(tensor.shape[1:]))
        shapes = [shape] * tensor.shape[0]
        columns.append(Column(name, _dtype(name, tensor), _flat(name, [tensor]), shapes, shape))
    _check_names(columns)
    return columns


def dtypes_differ(items: Sequence[BufferItem]) -> EncodeError:
    """Return the error for one group whose samples differ in a field's dtype."""
    for name, tensors in _tensors_by_name(items):
        dtypes = sorted({str(tensor.dtype) for tensor in tensors if tensor is not None})
        if len(dtypes) > 1:
            return EncodeError(
                f"{name} is {' and '.join(dtypes)} within one group: "
                "convert its samples to one dtype before putting them."
            )
    return EncodeError("the dtypes of a field changed while it was encoded.")


def _tensors_by_name(items: Sequence[BufferItem]) -> list[tuple[str, list[Tensor | None]]]:
    found: list[tuple[str, list[Tensor | None]]] = []
    for name, get in _FIELDS:
        tensors = list(map(get, items))
        kinds = set(map(type, tensors))
        if kinds not in _PLAIN and not kinds <= {Tensor, type(None)}:
            for item in items:
                named_tensors(item)  # refuses all types but Tensor and its subclasses
        found.append((name, tensors))
    if any(item.tensors for item in items):
        named = [named_tensors(item) for item in items]
        further = {name for item in items for name in item.tensors}
        further &= {name for row in named for name in row}
        found += [(name, [row.get(name) for row in named]) for name in _sorted_names(further)]
    return found


def _sorted_fields(named: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    standard = [(name, named[name]) for name in TENSOR_FIELDS if name in named]
    return standard + [(name, named[name]) for name in _sorted_names(named.keys() - TENSOR_FIELDS)]


def _sorted_names(names: set[str]) -> list[str]:
    for name in names:
        if not isinstance(name, str):
            raise EncodeError(f"the name {name!r} in `tensors` is not a str.")
    return sorted(names)


def _check_names(columns: Sequence[Column]) -> None:
    if len(columns) > MAX_COLUMNS:
        raise EncodeError(f"{len(columns)} tensors a sample are more than {MAX_COLUMNS}.")
    for column in columns:
        if column.name not in TENSOR_FIELDS:
            check_text(column.name, MAX_NAME_BYTES, "a name in `tensors`")


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


def _alike(name: str, tensors: Sequence[Tensor | None]) -> Column | None:
    """Return the column of plain tensors of one shape and dtype: the fast path.

    None for all other tensors; `_column` takes these.
    """
    if len(tensors) == 1 or set(map(type, tensors)) != {Tensor}:
        return None
    dtypes = set(map(_get_dtype, tensors))
    dtype = BY_TORCH.get(dtypes.pop())
    if dtypes or dtype is None:
        return None
    try:
        rows = torch.stack(tensors)  # type: ignore[arg-type]  # raises on unequal shapes
        flat = rows.cpu().reshape(-1)
    except RuntimeError:
        return None
    shape = _checked_shape(name, tuple(rows.shape[1:]))
    return Column(name, dtype, flat, [shape] * len(tensors), shape)


def _column(name: str, tensors: Sequence[Tensor | None], present: Sequence[Tensor]) -> Column:
    dtype = _dtype(name, present[0])
    shapes: list[Shape | None] = [None if tensor is None else tensor.shape for tensor in tensors]
    shape = shapes[0]
    if shape is not None and shapes.count(shape) == len(shapes):
        shape = _checked_shape(name, tuple(shape))
        return Column(name, dtype, _flat(name, present, shape), [shape] * len(shapes), shape)
    shapes = [None if shape is None else _checked_shape(name, tuple(shape)) for shape in shapes]
    return Column(name, dtype, _flat(name, present), shapes, None)


def _dtype(name: str, tensor: Tensor) -> DType:
    dtype = BY_TORCH.get(tensor.dtype)
    if dtype is None:
        raise EncodeError(
            f"{name} is {tensor.dtype}, which the wire format does not have: convert it first."
        )
    return dtype


def _checked_shape(name: str, shape: Shape) -> Shape:
    elements = 1
    for size in shape:
        elements *= size or 1
    if len(shape) > MAX_RANK or elements > MAX_ELEMENTS:
        raise EncodeError(
            f"{name} has shape {list(shape)}: at most {MAX_RANK} dimensions and "
            f"{MAX_ELEMENTS} elements can be stored."
        )
    return shape


def _flat(name: str, tensors: Sequence[Tensor], shape: Shape | None = None) -> Tensor:
    """Return all elements in one flat contiguous tensor on the CPU, detached."""
    try:
        joined = tensors[0].detach() if len(tensors) == 1 else _joined(tensors, shape)
        return joined.cpu().resolve_neg().contiguous().reshape(-1)
    except RuntimeError as error:
        raise EncodeError(f"{name} cannot be read as plain memory: {error}") from error


def _joined(tensors: Sequence[Tensor], shape: Shape | None) -> Tensor:
    """Return one tensor with the elements of all; `shape` is None if their shapes differ."""
    try:
        return _catenate(tensors, shape)
    except RuntimeError:  # they may lie on several devices
        return _catenate([tensor.cpu() for tensor in tensors], shape)


def _catenate(tensors: Sequence[Tensor], shape: Shape | None) -> Tensor:
    if shape:
        return torch.cat(list(tensors))
    if shape is not None:
        return torch.stack(list(tensors))
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
