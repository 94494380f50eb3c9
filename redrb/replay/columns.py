"""Numbers of a rollout as tensors, which the codec stores in few bytes.

A column is named `<field>:<container>:<dtype>`, so that the rollouts of one group may hold a field
in different containers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from redrb.codec.tensor_dtypes import BY_TORCH
from redrb.errors import DecodeError
from redrb.replay.arrays import TORCH_NAMES

_NUMPY_KINDS = "biuf"


def pack_column(field: str, value: Any) -> tuple[str, Tensor] | None:
    """Return a column's name and tensor; None if the value is no list or array of numbers."""
    container, tensor = _container(value)
    if tensor is None or tensor.dtype not in BY_TORCH:
        return None
    return f"{field}:{container}:{TORCH_NAMES[tensor.dtype]}", tensor


def unpack_column(name: str, tensor: Tensor) -> tuple[str, Any]:
    """Return a field and its value.

    Raises:
        DecodeError: The name is not that of a column.
    """
    field, _, rest = name.partition(":")
    container, _, dtype = rest.partition(":")
    if dtype == TORCH_NAMES[tensor.dtype]:
        if container == "list" and tensor.dtype in (torch.int64, torch.float64, torch.float32):
            return field, tensor.tolist()
        if container == "numpy":
            return field, tensor.numpy()
        if container == "tensor":
            return field, tensor
    raise DecodeError(f"the column {name!r:.80} of {tensor.dtype} is not part of a rollout.")


def _container(value: Any) -> tuple[str, Tensor | None]:
    if type(value) is list:
        return "list", _of_list(value)
    if type(value) is np.ndarray:
        if value.dtype.kind not in _NUMPY_KINDS or not value.dtype.isnative or not value.ndim:
            return "numpy", None
        if value.dtype.itemsize > 8:  # long double
            return "numpy", None
        return "numpy", torch.from_numpy(np.array(value, order="C"))
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return "tensor", value.detach()
    return "", None


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
