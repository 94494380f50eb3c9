"""Numpy arrays and torch tensors as bytes or columns, and back; element types are checked by name.

A column is a tensor that the codec stores in few bytes. It is named `<field>:<container>:<dtype>`,
so that the rollouts of one group may hold a field in different containers.
"""

from __future__ import annotations

import math
import re
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redrb.codec.collecting import BY_TORCH
from redrb.codec.wire import MAX_ELEMENTS, MAX_RANK
from redrb.errors import DecodeError, RecordError

_NUMPY_KINDS = "biufcmMSU"
"""Kinds of elements that are plain bytes: no objects and no structures."""

_NUMPY_NAME = re.compile(rf"[<>|][{_NUMPY_KINDS}][0-9]{{1,9}}(\[[0-9A-Za-z]{{1,8}}\])?")

_TORCH = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (*BY_TORCH, torch.complex64, torch.complex128)
}
_TORCH_NAMES = {dtype: name for name, dtype in _TORCH.items()}


def pack_numpy(array: NDArray[Any] | np.generic, field: str) -> dict[str, Any]:
    """Return element type, shape and bytes in C order of an array, or of a scalar."""
    if array.dtype.kind not in _NUMPY_KINDS or array.dtype.names is not None:
        raise RecordError(
            f"{field} holds a numpy array of {array.dtype}: only numbers, strings and times can be "
            "stored.",
            field=field,
        )
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": array.tobytes()}


def unpack_numpy(dtype: object, shape: object, data: object) -> NDArray[Any]:
    """Return a writable array from untrusted bytes."""
    if not isinstance(dtype, str) or not _NUMPY_NAME.fullmatch(dtype):
        _malformed(f"elements of {dtype!r:.80}")
    try:
        kind = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise DecodeError(f"a rollout holds an array of unknown {dtype!r}.") from error
    checked, raw = _checked(dtype, kind.itemsize, shape, data)
    if kind.itemsize == 0:
        return np.empty(checked, kind)
    return np.frombuffer(bytearray(raw), kind).reshape(checked)


def pack_tensor(tensor: Tensor, field: str) -> dict[str, Any]:
    """Return element type, shape and bytes of a tensor."""
    name = _TORCH_NAMES.get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided:
        raise RecordError(
            f"{field} holds a tensor of {tensor.dtype}, {tensor.layout}: it cannot be stored.",
            field=field,
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return {"dtype": name, "shape": list(tensor.shape), "data": flat.numpy().tobytes()}


def unpack_tensor(dtype: object, shape: object, data: object) -> Tensor:
    """Return a tensor from untrusted bytes."""
    kind = _TORCH.get(dtype) if isinstance(dtype, str) else None
    if kind is None:
        _malformed(f"a tensor of {dtype!r:.80}")
    checked, raw = _checked(dtype, kind.itemsize, shape, data)
    if not raw:
        return torch.empty(checked, dtype=kind)
    return torch.frombuffer(bytearray(raw), dtype=kind).reshape(checked)


def pack_column(field: str, value: Any) -> tuple[str, Tensor] | None:
    """Return a column's name and tensor; None if the value is no list or array of numbers."""
    container, tensor = "", None
    if type(value) is list:
        container, tensor = "list", _of_list(value)
    elif type(value) is np.ndarray:
        plain = value.dtype.kind in "biuf" and value.dtype.isnative and value.dtype.itemsize <= 8
        if plain and value.ndim:
            container, tensor = "numpy", torch.from_numpy(np.array(value, order="C"))
    elif isinstance(value, Tensor) and value.layout is torch.strided:
        container, tensor = "tensor", value.detach()
    if tensor is None or tensor.dtype not in BY_TORCH:
        return None
    return f"{field}:{container}:{_TORCH_NAMES[tensor.dtype]}", tensor


def unpack_column(name: str, tensor: Tensor) -> tuple[str, Any]:
    """Return a field and its value, or raise DecodeError."""
    field, _, rest = name.partition(":")
    container, _, dtype = rest.partition(":")
    if dtype == _TORCH_NAMES[tensor.dtype]:
        if container == "list" and tensor.dtype in (torch.int64, torch.float64, torch.float32):
            return field, tensor.tolist()
        if container == "numpy":
            return field, tensor.numpy()
        if container == "tensor":
            return field, tensor
    raise DecodeError(f"the column {name!r:.80} of {tensor.dtype} is not part of a rollout.")


def _of_list(values: list[Any]) -> Tensor | None:
    """Return a list of ints or floats as a tensor, bit for bit; None for other lists."""
    kinds = set(map(type, values))
    if kinds <= {int}:
        try:
            return torch.from_numpy(np.array(values, dtype=np.int64))
        except OverflowError:
            return None
    if kinds != {float}:
        return None
    wide = np.array(values, dtype=np.float64)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    exact = np.array_equal(narrow.astype(np.float64).view(np.int64), wide.view(np.int64))
    return torch.from_numpy(narrow if exact else wide)


def _checked(dtype: object, itemsize: int, shape: object, data: object) -> tuple[list[int], bytes]:
    """Return shape and bytes of an array after checking that they fit each other."""
    if not isinstance(data, bytes):
        _malformed("an array without bytes")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_RANK
        or any(type(size) is not int or not 0 <= size <= MAX_ELEMENTS for size in shape)
    ):
        _malformed(f"the shape {shape!r:.80}")
    if math.prod(shape) * itemsize != len(data):
        _malformed(f"{len(data)} bytes of {dtype} for shape {shape}")
    return shape, data


def _malformed(content: str) -> NoReturn:
    raise DecodeError(f"a stored rollout is malformed: it holds {content}.")
