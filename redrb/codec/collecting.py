"""From samples to addresses: where the elements of each tensor lie in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Final, NamedTuple

import msgpack
import torch
from torch import Tensor

from redrb.codec import kernels
from redrb.codec.dtypes import DTYPES, DType
from redrb.codec.kernels import Cell, Columns, EncodedColumn
from redrb.codec.layout import FIELD_CODES
from redrb.codec.wire import MAX_COLUMNS, MAX_ELEMENTS, MAX_NAME_BYTES, MAX_RANK
from redrb.errors import EncodeError
from redrb.experience.checking import DIMENSIONS, INTEGER_FIELDS
from redrb.experience.consistency import VALUE_FIELDS
from redrb.experience.padding import ACTION_FIELDS, MASKS, Shape
from redrb.experience.records import TENSOR_FIELDS, BufferItem, named_tensors
from redrb.unpacking import unpack

BY_TORCH: Final = {dtype.tensor: dtype for dtype in DTYPES}
"""The wire's dtype of each dtype of tensors; other dtypes cannot be stored."""

_EXCHANGE = getattr(Tensor, "__dlpack_c_exchange_api__", None)
"""DLPack's functions in C; where torch is too old for them, tensors are asked in Python."""

_TYPES = (Tensor, torch.int8, torch.uint8)
"""The type of plain tensors; the dtypes of bytes, which DLPack takes smaller integers for."""


def _rules(*, values: bool) -> bytes:
    """Return what `check_groups` asks of each standard field, as `Kernel.collect` takes it."""
    rules = bytearray()
    for name in TENSOR_FIELDS:
        ranks, needs = DIMENSIONS[name], 1 * (name in INTEGER_FIELDS)
        needs |= 2 * (name == "reward") | 4 * (name == "token_versions") | 8 * (name in MASKS)
        needs |= 16 * (values and name in VALUE_FIELDS)
        rules += bytes((min(ranks), max(ranks), name in ACTION_FIELDS, needs))
    return bytes(rules)


_RULES = {values: _rules(values=values) for values in (False, True)}
"""The rules without and with a check of values."""


class Collected(NamedTuple):
    """The columns of one group.

    Attributes:
        held: The tensors whose memory the columns name.
        oldest, newest: The oldest and the newest version >= 0 in `token_versions`.
    """

    columns: object
    held: list[Tensor]
    oldest: int | None
    newest: int | None


class Collector:
    """Finds the memory of samples' tensors.

    With `values`, the kernel checks the numbers of `VALUE_FIELDS` as it encodes them.
    """

    def __init__(self, *, values: bool = False) -> None:
        self._checked = VALUE_FIELDS if values else ()
        self._rules = _RULES[values]

    def plain(self, group: Sequence[BufferItem]) -> Columns | None:
        """Return the columns of a group whose tensors are plain CPU memory; None of any other."""
        tables = [item.tensors for item in group if type(item) is BufferItem]
        if _EXCHANGE is None or len(tables) != len(group):
            return None
        named = _named(frozenset(chain.from_iterable(tables)) if any(tables) else frozenset())
        if named is None:
            return None
        found = kernels.kernel.collect(
            tuple(group), tuple(tables), *named, self._rules, _TYPES, _EXCHANGE
        )
        return None if found is None else Columns(*found)

    def any(self, group: Sequence[BufferItem]) -> Collected:
        """Return the columns of a group of any tensors, or raise RecordError or EncodeError."""
        named = [named_tensors(item) for item in group]
        names = (*TENSOR_FIELDS, *further_names(name for row in named for name in row))
        columns: list[EncodedColumn] = []
        held: list[Tensor] = []
        oldest = newest = None
        for name in names:
            plain = [
                None if tensor is None else plain_memory(name, tensor)
                for tensor in (row.get(name) for row in named)
            ]
            present = [tensor for tensor in plain if tensor is not None]
            if not present:
                continue
            held += present
            dtypes = {tensor.dtype for tensor in present}
            if len(dtypes) > 1:
                raise dtypes_differ(name, plain)
            dtype = dtype_of(name, dtypes.pop())
            if name == "token_versions":
                oldest, newest = known_versions(present)
            cells: list[Cell | None] = []
            for tensor in plain:
                if tensor is not None:
                    check_shape(name, tuple(tensor.shape))
                cells.append(None if tensor is None else (tensor.data_ptr(), tuple(tensor.shape)))
            columns.append((key_of(name), dtype.code, -1, cells, name in self._checked))
        if len(columns) > MAX_COLUMNS:
            raise EncodeError(f"{len(columns)} tensors a sample are more than {MAX_COLUMNS}.")
        return Collected(columns, held, oldest, newest)


def plain_memory(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor's elements in one contiguous tensor on the CPU, without its history.

    Raises:
        EncodeError: It has no elements that lie one after the other.
    """
    if tensor.is_nested:
        raise EncodeError(f"{name} is a nested tensor: unbind it, and give its parts.")
    if tensor.layout is not torch.strided:
        raise EncodeError(
            f"{name} is a tensor of layout {tensor.layout}: give a dense one, with .to_dense()."
        )
    if tensor.is_meta:
        raise EncodeError(f"{name} is on the device meta, where tensors have no elements.")
    kind = type(tensor)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise EncodeError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, a tensor that stands for others: "
            "give a plain one, such as full_tensor() of a DTensor."
        )
    try:
        plain = tensor.detach().cpu().resolve_neg().contiguous()
        address = plain.data_ptr()
    except (RuntimeError, ValueError, TypeError) as error:
        raise EncodeError(f"{name} cannot be read as plain memory: {error}") from error
    if not address and plain.numel():
        raise EncodeError(
            f"{name} has no memory: its storage was freed, or stands for zeros alone."
        )
    return plain


def dtype_of(name: str, dtype: torch.dtype) -> DType:
    """Return the wire's dtype, or raise EncodeError where it has none."""
    known = BY_TORCH.get(dtype)
    if known is None:
        raise EncodeError(
            f"{name} is {dtype}, which the wire format does not have: convert it first."
        )
    return known


def dtypes_differ(name: str, tensors: Sequence[Tensor | None]) -> EncodeError:
    """Return the error for one group whose samples differ in a field's dtype."""
    first: dict[str, int] = {}
    for sample, tensor in enumerate(tensors):
        if tensor is not None:
            first.setdefault(str(tensor.dtype), sample)
    listed = " and ".join(f"{dtype} in sample {sample}" for dtype, sample in first.items())
    return EncodeError(
        f"{name} is {listed} within one group: "
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
    for key, _, _, cells, _ in columns:
        for cell in cells:
            if cell is not None:
                name = unpack(key, "name")
                check_shape(TENSOR_FIELDS[name] if isinstance(name, int) else name, cell[1])


def known_versions(tokens: Sequence[Tensor]) -> tuple[int, int] | tuple[None, None]:
    """Return the oldest and the newest version >= 0 of tokens; None for both if there is none.

    Raises:
        EncodeError: They are no integers.
    """
    found: list[int] = []
    for each in tokens:
        if each.dtype.is_floating_point or each.dtype is torch.bool:
            raise EncodeError(f"token_versions is {each.dtype}: versions are integers.")
        known = each.to(torch.int64)
        known = known[known >= 0]
        if known.numel():
            found += (int(known.min()), int(known.max()))
    return (min(found), max(found)) if found else (None, None)


@lru_cache(maxsize=1024)
def key_of(name: str) -> bytes:
    """Return the key of a field in a schema, packed: the code of a standard field, or its name."""
    packed: bytes = msgpack.packb(FIELD_CODES.get(name, name))
    return packed


@lru_cache(maxsize=128)
def _named(further: frozenset[str]) -> tuple[tuple[str, ...], tuple[bytes, ...]] | None:
    """Return all names and their keys; None where a further tensor has a standard field's name."""
    if not further.isdisjoint(TENSOR_FIELDS):
        return None
    names = (*TENSOR_FIELDS, *further_names(further))
    return names, tuple(map(key_of, names))


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
