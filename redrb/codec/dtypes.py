"""Element types of the wire, and tensors seen as integers that carry their bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Storage: TypeAlias = NDArray[Any]
"""A tensor's elements as numpy integers: floats and bools by their bit patterns."""


@dataclass(frozen=True, slots=True)
class DType:
    """One element type of the wire.

    Attributes:
        code: Its number on the wire.
        tensor: The tensors' dtype.
        carrier: Torch dtype of the same size that numpy has too.
        native: Numpy dtype of the carrier.
        storage: Numpy integer dtype that carries its bits.
        unsigned: The unsigned integer dtype of the same size.
        itemsize: Bytes of one element in memory.
        exponent: Bits that are all set where a float is not finite; 0 for other dtypes.
        low: Smallest value of a run on the wire.
        high: Largest value of a run on the wire.
        wires: Codes that a body of this dtype may be stored as.
    """

    code: int
    tensor: torch.dtype
    carrier: torch.dtype
    native: np.dtype[Any]
    storage: np.dtype[Any]
    unsigned: np.dtype[Any]
    itemsize: int
    exponent: int
    low: int
    high: int
    wires: frozenset[int]


# a new dtype also gets its code and its size in `redrb/codec/_core.h`
BOOL, INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64 = range(9)
FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2 = range(9, 15)
_INTEGERS: Final = range(INT8, UINT64 + 1)
_TORCH: Final = (
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.float32, torch.float64),
    *(torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
)
_STORAGE: Final = (
    *("u1", "i1", "i2", "i4", "i8"),
    *("u1", "u2", "u4", "u8"),
    *("u2", "u4", "u8"),
    *("u2", "u1", "u1"),
)
_EXPONENTS: Final = {
    FLOAT16: 0x7C00,
    FLOAT32: 0x7F800000,
    FLOAT64: 0x7FF0000000000000,
    BFLOAT16: 0x7F80,
    FLOAT8_E4M3FN: 0x7F,
    FLOAT8_E5M2: 0x7C,
}
_CARRIERS: Final = {BFLOAT16: torch.int16, FLOAT8_E4M3FN: torch.uint8, FLOAT8_E5M2: torch.uint8}


def _make_dtype(code: int) -> DType:
    storage = np.dtype("<" + _STORAGE[code])
    low, high = (0, 1) if code == BOOL else _range(storage)
    wires = {code}
    if code in _INTEGERS:
        held = [(other, *_range(np.dtype(_STORAGE[other]))) for other in _INTEGERS]
        wires |= {BOOL, *(other for other, least, most in held if least >= low and most <= high)}
    elif code in (FLOAT32, FLOAT64):
        wires |= {FLOAT16, BFLOAT16}
    carrier = _CARRIERS.get(code, _TORCH[code])
    native = torch.empty(0, dtype=carrier).numpy().dtype
    unsigned = np.dtype(f"<u{storage.itemsize}")
    types = (_TORCH[code], carrier, native, storage, unsigned, storage.itemsize)
    return DType(code, *types, _EXPONENTS.get(code, 0), low, high, frozenset(wires))


def _range(storage: np.dtype[Any]) -> tuple[int, int]:
    info = np.iinfo(storage)
    return int(info.min), int(info.max)


DTYPES: Final = tuple(_make_dtype(code) for code in range(len(_TORCH)))
BY_TORCH: Final = {dtype.tensor: dtype for dtype in DTYPES}


def storage_of(tensor: Tensor, dtype: DType) -> Storage:
    """Return a contiguous CPU tensor's elements, flat and without a copy."""
    if dtype.carrier is not dtype.tensor:
        tensor = tensor.view(dtype.carrier)
    array: Storage = tensor.numpy()
    return array.reshape(-1).view(dtype.storage)


def tensor_of(array: Storage, dtype: DType) -> Tensor:
    """Return the tensor whose elements `array` holds, without a copy."""
    tensor = torch.from_numpy(array.view(dtype.native))
    return tensor if dtype.carrier is dtype.tensor else tensor.view(dtype.tensor)
