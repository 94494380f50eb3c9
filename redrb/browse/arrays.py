"""`read_array`: one tensor of a group as a numpy array."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from redrb.browse.records import FieldView
from redrb.codec.kernels import Group
from redrb.codec.schema import Field

Array = NDArray[Any]


def read_array(group: Group, column: int, row: int, field: Field, shape: tuple[int, ...]) -> Array:
    """Return a tensor of a checked group; floats that numpy lacks become float32."""
    stored = np.empty(math.prod(shape), field.dtype.storage)
    group.read(column, row, stored.ctypes.data, stored.nbytes)
    numbers: Array
    match field.dtype.name:
        case "bfloat16":
            numbers = (stored.astype(np.uint32) << 16).view(np.float32)
        case "float8_e5m2":
            with np.errstate(invalid="ignore"):
                numbers = (stored.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
        case "float8_e4m3fn":
            numbers = _E4M3FN[stored]
        case name:
            numbers = stored.view(np.dtype(name))
    return numbers.reshape(shape)


def _e4m3fn() -> Array:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = (8 + mantissa) * np.exp2(exponent - 10.0)
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    magnitude[(exponent == 15) & (mantissa == 7)] = np.nan
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float32)


_E4M3FN: Final = _e4m3fn()
"""The value of each byte."""


def described(name: str, dtype: str, array: Array) -> FieldView:
    """Return the description of a tensor, with its range and mean."""
    if not array.size:
        return FieldView(name, dtype, array.shape)
    with np.errstate(invalid="ignore"):  # of signalling nans
        numbers = array.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    lost = array.size - finite.size
    if not finite.size:
        return FieldView(name, dtype, array.shape, not_finite=lost)
    low, high, mean = float(finite.min()), float(finite.max()), float(finite.mean())
    value = None if array.ndim or lost else low
    return FieldView(name, dtype, array.shape, low, high, mean, lost, value)


def numbers_of(array: Array) -> tuple[float | None, ...]:
    """Return the elements as numbers; None for those that are not finite."""
    with np.errstate(invalid="ignore"):
        array = array.astype(np.float64)
    return tuple(each if math.isfinite(each) else None for each in array.tolist())


def mean_of(rewards: tuple[float | None, ...]) -> float | None:
    """Return the mean of the known rewards; None if there is none."""
    known = [each for each in rewards if each is not None]
    return math.fsum(known) / len(known) if known else None
