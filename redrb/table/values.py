"""How a table stores a value: a tensor or array, what msgpack holds, or a signed pickle.

A value begins with a byte that says what it is. `redrb.codec.plain.cells` describes tensors and
arrays. Behind the byte of an object stands msgpack, behind that of a pickle its HMAC-SHA256
(32 bytes) and the pickle.
"""

from __future__ import annotations

import hmac
import io
import pickle  # noqa: TID251 (only what is signed with the user's secret is loaded)
import struct
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgpack
import numpy as np

from redrb.codec.dtypes import DTYPES
from redrb.codec.plain.cells import ARRAY, HEAD, TENSOR, read_cell, spread
from redrb.codec.wire import MAX_ELEMENTS, MAX_RANK
from redrb.errors import ConfigError, DecodeError, EncodeError
from redrb.packing import pack_equal
from redrb.unpacking import unpack

if TYPE_CHECKING:
    import torch

Piece: TypeAlias = bytes | memoryview

OBJECT, PICKLE = ARRAY + 1, ARRAY + 2
_SIGNATURE: Final = 32
_KIND: Final = attrgetter("__class__", "dtype", "layout", "is_nested", "is_meta", "is_cpu")
_CODES: Final = {dtype.name: dtype.code for dtype in DTYPES}
_NUMPY: Final = {
    code: name for name, code in _CODES.items() if "float8" not in name and name != "bfloat16"
}


def head_of(kind: int, dtype: str, shape: tuple[int, ...], what: str) -> bytes:
    """Return what stands before the elements of a tensor or an array."""
    try:
        return _head(kind, dtype, shape)
    except EncodeError as error:
        raise EncodeError(f"{what}: {error}") from None


@lru_cache(maxsize=8192)
def _head(kind: int, dtype: str, shape: tuple[int, ...]) -> bytes:
    code = _CODES.get(dtype)
    if code is None or (kind == ARRAY and code not in _NUMPY):
        raise EncodeError(f"tables hold no elements of dtype {dtype}.")
    if len(shape) > MAX_RANK or spread(shape) > MAX_ELEMENTS:
        raise EncodeError(f"tables hold at most {MAX_RANK} dimensions and {MAX_ELEMENTS} elements.")
    return HEAD.pack(kind, code, len(shape)) + struct.pack(f"<{len(shape)}I", *shape)


class Values:
    """Encodes and decodes the values of a table.

    With a secret, Python objects that msgpack does not hold are pickled and signed; no other pickle
    is ever loaded. Everyone who knows the secret can run code in the processes that read.
    """

    def __init__(self, secret: str | bytes | None = None) -> None:
        if not isinstance(secret, str | bytes | bytearray | None):
            raise ConfigError(f"secret is of type {type(secret).__name__}: give a text or bytes.")
        if secret is not None and not secret:
            raise ConfigError(
                "secret is empty, so that everybody could sign: give a text, or None."
            )
        self._secret = secret.encode() if isinstance(secret, str) else secret

    def encode_column(self, name: str, values: Any, keys: Sequence[str]) -> list[tuple[Piece, ...]]:
        """Return the pieces of the value of each row.

        Raises:
            EncodeError: There is not one value for each row, or a value cannot be stored.
        """
        what = f"column {name!r}"
        if is_tensor(values) and values.is_nested and str(values.layout) == "torch.strided":
            values = rows_of_nested(values, what)  # it has no length
        try:
            count = len(values)
        except TypeError:
            raise EncodeError(
                f"{what} is a {type(values).__name__}: give one value for each row."
            ) from None
        if isinstance(values, _NO_COLUMNS) or count != len(keys):
            raise EncodeError(f"{what}: give one value for each of the {len(keys)} rows.")
        if is_tensor(values):
            rows = _rows_of_tensor(values, what)
            if rows is not None:
                return rows
            values = rows_of_nested(values, what)
        elif _is_array(values):
            return _rows(ARRAY, str(values.dtype), np.ascontiguousarray(values), what)
        elif len(values) > 1 and all(map(is_tensor, values)):
            rows = _rows_of_list(list(values), what)
            if rows is not None:
                return rows
        return [
            self._encode(name, value, key, what) for key, value in zip(keys, values, strict=True)
        ]

    def _encode(self, name: str, value: Any, key: str, what: str) -> tuple[Piece, ...]:
        if is_tensor(value):
            data = memoryview(_bytes_of(value, what))
            return head_of(TENSOR, _dtype_of(value), tuple(value.shape), what), data
        if _is_array(value):
            head = head_of(ARRAY, str(value.dtype), value.shape, what)
            return head, memoryview(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        value = python_value(value)
        try:
            packed = pack_equal(value, strict=True)
        except ValueError as error:
            if self._secret is None:
                dtype = f" of dtype {value.dtype}" if isinstance(value, np.ndarray) else ""
                raise EncodeError(
                    f"{what}, row {key!r}: a {type(value).__module__}.{type(value).__qualname__}"
                    f"{dtype} cannot be stored ({error}). Tables hold tensors, arrays of numbers, "
                    "and what msgpack holds: None, bool, int, float, str, bytes, lists and dicts. "
                    "Other Python objects are pickled and signed if all processes open the table "
                    "with the same secret=."
                ) from error
            try:
                pickled = _pickled(value)
            except Exception as failed:  # code of the object raises what it likes
                raise EncodeError(
                    f"{what}, row {key!r}: a {type(value).__module__}.{type(value).__qualname__} "
                    f"cannot be pickled: {failed}"
                ) from failed
            return bytes([PICKLE]) + self._sign(name, key, pickled), pickled
        return bytes([OBJECT]), packed

    def decode(self, name: str, key: str, stored: memoryview) -> Any:
        """Return a value.

        Raises:
            DecodeError: It is no value, or a pickle that was not signed with the secret.
        """
        what = f"column {name!r} of row {key!r}"
        kind = stored[0] if stored else -1
        if kind in (TENSOR, ARRAY):
            cell = read_cell(stored)
            if cell is None:
                raise DecodeError(f"{what} has another length than its shape says")
            _, code, shape, data = cell
            flat = np.frombuffer(bytearray(data), DTYPES[code].storage)
            return shaped(kind, code, flat, shape)
        if kind == OBJECT:
            return unpack(stored[1:], what)
        if kind == PICKLE:
            signature, pickled = bytes(stored[1 : 1 + _SIGNATURE]), bytes(stored[1 + _SIGNATURE :])
            if self._secret is None:
                raise DecodeError(
                    f"{what} is a pickled Python object: open the table with the secret= with "
                    "which it was signed."
                )
            if not hmac.compare_digest(signature, self._sign(name, key, pickled)):
                raise DecodeError(
                    f"{what} is a pickled Python object with another signature: it was altered, or "
                    "signed with another secret. It was not loaded."
                )
            try:
                return pickle.loads(pickled)  # noqa: S301 (who signed it knows the secret)
            except Exception as error:  # code of the object raises what it likes
                raise DecodeError(
                    f"{what} is a pickled Python object that cannot be loaded here: {error}. All "
                    "processes need the modules that define it."
                ) from error
        raise DecodeError(f"{what} is no value of a table")

    def _sign(self, name: str, key: str, pickled: bytes) -> bytes:
        secret = self._secret or b""
        place = msgpack.packb([name, key])
        return hmac.digest(secret, place + pickled, "sha256")


_NO_COLUMNS: Final = (str, bytes, bytearray, memoryview, Mapping, Set)
"""Types of values that have a length, and are not one value for each row."""


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor; imports no torch."""
    kind = type(value)
    if kind not in _TENSORS:
        kinds = kind.__mro__
        _TENSORS[kind] = any((e.__module__, e.__name__) == ("torch", "Tensor") for e in kinds)
    return _TENSORS[kind]


_TENSORS: dict[type, bool] = {}


def shaped(kind: int, code: int, flat: Any, shape: Sequence[int]) -> Any:
    """Return elements that numpy carries as a tensor or an array."""
    if kind == ARRAY:
        if code not in _NUMPY:
            raise DecodeError(f"numpy has no dtype {DTYPES[code].name}")
        return flat.view(_NUMPY[code]).reshape(shape)
    import torch

    return torch.from_numpy(flat).view(DTYPES[code].tensor).reshape(tuple(shape))


def _is_array(value: object) -> bool:
    """Return whether a value is an array of numbers, and neither masked nor a matrix."""
    # a mask would be lost, and rows of a matrix are matrices
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray | np.matrix):
        return False
    return value.dtype.kind not in "OSUmM"  # objects, texts and dates


def python_value(value: Any) -> Any:
    """Return a number or text of numpy as the equal one of Python; others as they are."""
    if not isinstance(value, np.generic):
        return value
    if isinstance(value, np.str_):
        return str.__str__(value)
    if isinstance(value, np.bytes_):
        return bytes(value)
    return value.item() if value.dtype.kind in "biuf" else value  # of times, item() is another one


def rows_of_nested(values: torch.Tensor, what: str) -> list[torch.Tensor]:
    """Return the rows of a nested tensor; raises EncodeError where its parts contradict it."""
    try:
        return list(values.unbind())
    except RuntimeError as error:
        raise EncodeError(f"{what} is a nested tensor without rows that fit it: {error}") from error


class _Pickler(pickle.Pickler):
    """Pickles a tensor that is a view without the rest of the memory that it looks at."""

    def reducer_override(self, value: Any) -> Any:
        if not is_tensor(value):
            return NotImplemented
        tensor: Any = _without_rest(value)
        return tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def _pickled(value: object) -> bytes:
    pickled = io.BytesIO()
    _Pickler(pickled).dump(value)
    return pickled.getvalue()


def _without_rest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds nothing else: a copy, unless it is that already.

    Tensors that consist of others, such as nested ones, are returned: these come by themselves.
    """
    import torch

    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return tensor
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return tensor
    plain = tensor.detach().as_subclass(torch.Tensor)
    count, span = plain.numel(), 1
    for size, stride in zip(plain.shape, plain.stride(), strict=True):
        span += (size - 1) * stride
    if plain.untyped_storage().nbytes() <= min(count, span) * plain.element_size():
        return tensor
    if count <= span:
        plain = plain.clone()
    else:  # rows share elements
        plain = plain.as_strided((span,), (1,)).clone().as_strided(plain.shape, plain.stride())
    copy = plain.as_subclass(type(tensor)).requires_grad_(tensor.requires_grad)
    vars(copy).update(vars(tensor))
    return copy


def _dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes_of(tensor: torch.Tensor, what: str) -> Any:
    import torch

    from redrb.codec.collecting import plain_memory

    if _dtype_of(tensor) not in _CODES:
        raise EncodeError(f"{what}: tables hold no elements of dtype {_dtype_of(tensor)}.")
    return plain_memory(what, tensor).reshape(-1).view(torch.uint8).numpy()


def _rows_of_tensor(values: torch.Tensor, what: str) -> list[tuple[Piece, ...]] | None:
    """Return the rows of a tensor; None for a nested one that is to be unbound."""
    import torch

    dtype = _dtype_of(values)
    if not values.is_nested:
        return _rows(TENSOR, dtype, values, what)
    jagged: Any = values
    if values.layout is not torch.jagged or jagged._ragged_idx != 1 or jagged.lengths() is not None:  # noqa: SLF001
        return None
    return _ragged(jagged.values(), jagged.offsets().tolist(), what)


def _rows_of_list(values: Sequence[torch.Tensor], what: str) -> list[tuple[Piece, ...]] | None:
    """Return the rows of a list of tensors that differ in their first dimension alone, else None.

    They are copied to one buffer: a call of torch for each takes longer.
    """
    import torch

    kinds = set(map(_KIND, values))
    kind, dtype, layout, is_nested, is_meta, is_cpu = next(iter(kinds))
    if len(kinds) > 1 or is_nested or is_meta or layout is not torch.strided:
        return None
    if kind not in (torch.Tensor, torch.nn.Parameter) or str(dtype)[6:] not in _CODES:
        return None
    shapes = [each.shape for each in values]
    if not shapes[0] or any(not each or each[1:] != shapes[0][1:] for each in shapes):
        return None
    if not all(each.data_ptr() or not each.numel() for each in values):  # torch would read there
        return None
    try:
        whole = torch.cat(list(values) if is_cpu else [each.detach().to("cpu") for each in values])
    except RuntimeError:  # torch cannot read one of them: the row at fault is named then
        return None
    return _ragged(whole, [0, *accumulate(shape[0] for shape in shapes)], what)


def _ragged(values: torch.Tensor, offsets: Sequence[int], what: str) -> list[tuple[Piece, ...]]:
    dtype, inner = _dtype_of(values), tuple(values.shape[1:])
    data = memoryview(_bytes_of(values, what))
    size = len(data) // max(len(values), 1)
    return [
        (head_of(TENSOR, dtype, (end - begin, *inner), what), data[begin * size : end * size])
        for begin, end in pairwise(offsets)
    ]


def _rows(kind: int, dtype: str, values: Any, what: str) -> list[tuple[Piece, ...]]:
    head = head_of(kind, dtype, tuple(values.shape[1:]), what)
    data = memoryview(
        _bytes_of(values, what) if kind == TENSOR else values.reshape(-1).view(np.uint8)
    )
    size = len(data) // max(len(values), 1)
    return [(head, data[at * size : (at + 1) * size]) for at in range(len(values))]


def pack_tags(key: str, tags: Mapping[str, Any]) -> bytes:
    """Return the tags of a row as scripts merge them: each value packed by itself.

    Raises:
        EncodeError: They are no mapping, a name is no text, or msgpack does not hold its value.
    """
    packed: dict[str, Any] = {"": key}
    if not isinstance(tags, Mapping):
        raise EncodeError(f"row {key!r}: its tags are {tags!r:.80}: give a mapping.")
    for name, value in tags.items():
        if not isinstance(name, str) or not name or not name.isprintable():
            raise EncodeError(f"row {key!r}: the name of a tag is {name!r:.80}: give a text.")
        try:
            packed[name] = pack_equal(python_value(value), strict=True)
        except ValueError as error:
            raise EncodeError(
                f"row {key!r}: tag {name!r} cannot be stored ({error}): give None, a bool, int, "
                "float, str, bytes, or lists and dicts of these."
            ) from error
    whole: bytes = msgpack.packb(packed, use_bin_type=False)  # the servers' Lua knows no bytes
    return whole


class TagReader:
    """Reads the tags of rows; values that come again are unpacked once."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}
        self._names: dict[bytes, str] = {}

    def read(self, stored: bytes) -> tuple[str, dict[str, Any]]:
        """Return key and tags of a row; raises DecodeError for what redrb did not write."""
        found = unpack(stored, "tags of a row", raw=True)
        try:
            key: str = found.pop(b"").decode()
            return key, {
                self._names.get(name) or self._name(name): self._known[value]
                if value in self._known
                else self._value(value, name, key)
                for name, value in found.items()
            }
        except (AttributeError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise DecodeError(f"the tags of a row are no record of redrb: {error}") from error

    def _name(self, name: bytes) -> str:
        self._names[name] = name.decode()
        return self._names[name]

    def _value(self, stored: bytes, name: bytes, key: str) -> Any:
        value = unpack(stored, f"tag {name!r} of row {key!r}")
        if not isinstance(value, list | dict):  # rows share no value that can change
            self._known[stored] = value
        return value
