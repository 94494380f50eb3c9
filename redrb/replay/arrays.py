"""Numpy arrays and torch tensors as bytes, and back; element types are checked by name."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redrb.codec.tensor_dtypes import BY_TORCH
from redrb.codec.wire import MAX_ELEMENTS, MAX_RANK
from redrb.errors import DecodeError, RecordError

_NUMPY_KINDS = "biufcmMSU"
"""Kinds of elements that are plain bytes: no objects and no structures."""

_NUMPY_NAME = re.compile(rf"[<>|][{_NUMPY_KINDS}][0-9]{{1,9}}(\[[0-9A-Za-z]{{1,8}}\])?")

_TORCH = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (*BY_TORCH, torch.complex64, torch.complex128)
}
TORCH_NAMES = {dtype: name for name, dtype in _TORCH.items()}

Packed = tuple[str, list[int], bytes]
"""Element type, shape and bytes in C order."""


def pack_numpy(array: NDArray[Any] | np.generic, field: str) -> Packed:
    """Return a numpy array, or a scalar of shape [], as bytes."""
    if array.dtype.kind not in _NUMPY_KINDS or array.dtype.names is not None:
        raise RecordError(
            f"{field} holds a numpy array of {array.dtype}: only numbers, strings and times can be "
            "stored.",
            field=field,
        )
    return array.dtype.str, list(array.shape), array.tobytes()


def unpack_numpy(dtype: object, shape: object, data: object) -> NDArray[Any]:
    """Return a writable array from untrusted bytes."""
    if not isinstance(dtype, str) or not _NUMPY_NAME.fullmatch(dtype):
        _malformed(f"elements of {dtype!r:.80}")
    try:
        kind = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise DecodeError(f"a rollout holds an array of unknown {dtype!r}.") from error
    checked, size, raw = _checked(shape, data)
    if size * kind.itemsize != len(raw):
        _malformed(f"{len(raw)} bytes of {dtype} for shape {shape}")
    if kind.itemsize == 0:
        return np.empty(checked, kind)
    return np.frombuffer(bytearray(raw), kind).reshape(checked)


def pack_tensor(tensor: Tensor, field: str) -> Packed:
    """Return a tensor as bytes."""
    name = TORCH_NAMES.get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided:
        raise RecordError(
            f"{field} holds a tensor of {tensor.dtype}, {tensor.layout}: it cannot be stored.",
            field=field,
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return name, list(tensor.shape), flat.numpy().tobytes()


def unpack_tensor(dtype: object, shape: object, data: object) -> Tensor:
    """Return a tensor from untrusted bytes."""
    kind = _TORCH.get(dtype) if isinstance(dtype, str) else None
    if kind is None:
        _malformed(f"a tensor of {dtype!r:.80}")
    checked, size, raw = _checked(shape, data)
    if size * kind.itemsize != len(raw):
        _malformed(f"{len(raw)} bytes of {dtype} for shape {shape}")
    if not raw:
        return torch.empty(checked, dtype=kind)
    return torch.frombuffer(bytearray(raw), dtype=kind).reshape(checked)


def _checked(shape: object, data: object) -> tuple[Sequence[int], int, bytes]:
    if not isinstance(data, bytes):
        _malformed("an array without bytes")
    if not isinstance(shape, list) or len(shape) > MAX_RANK:
        _malformed(f"the shape {shape!r:.80}")
    if any(type(size) is not int or not 0 <= size <= MAX_ELEMENTS for size in shape):
        _malformed(f"the shape {shape!r:.80}")
    return shape, math.prod(shape), data


def _malformed(content: str) -> NoReturn:
    raise DecodeError(f"a stored rollout is malformed: it holds {content}.")
