"""Element types of the wire, as numpy carries their bits; torch is imported at the first tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Storage: TypeAlias = NDArray[Any]
"""A tensor's elements as numpy integers: floats and bools by their bit patterns."""


@dataclass(frozen=True)
class DType:
    """One element type of the wire.

    Attributes:
        code: Its number on the wire.
        name: Name of the tensors' dtype, such as "float32".
        storage: Numpy integer dtype that carries its bits.
        unsigned: The unsigned integer dtype of the same size.
        exponent: Bits that are all set where a float is not finite; 0 for other dtypes.
        low: Smallest value of a run on the wire.
        high: Largest value of a run on the wire.
        wires: Codes that a body of this dtype may be stored as.
    """

    code: int
    name: str
    storage: np.dtype[Any]
    unsigned: np.dtype[Any]
    itemsize: int
    exponent: int
    low: int
    high: int
    wires: frozenset[int]

    @cached_property
    def tensor(self) -> torch.dtype:
        """The tensors' dtype."""
        import torch

        dtype: torch.dtype = getattr(torch, self.name)
        return dtype


# a new dtype also gets its code and its size in `redrb/codec/_core.h`
BOOL, INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64 = range(9)
FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2 = range(9, 15)
_INTEGERS: Final = range(INT8, UINT64 + 1)
_NAMES: Final = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
    "float16 float32 float64 bfloat16 float8_e4m3fn float8_e5m2"
).split()
_STORAGE: Final = "u1 i1 i2 i4 i8 u1 u2 u4 u8 u2 u4 u8 u2 u1 u1".split()
_EXPONENTS: Final = {
    FLOAT16: 0x7C00,
    FLOAT32: 0x7F800000,
    FLOAT64: 0x7FF0000000000000,
    BFLOAT16: 0x7F80,
    FLOAT8_E4M3FN: 0x7F,
    FLOAT8_E5M2: 0x7C,
}


def _make_dtype(code: int) -> DType:
    storage = np.dtype("<" + _STORAGE[code])
    low, high = (0, 1) if code == BOOL else _range(storage)
    wires = {code}
    if code in _INTEGERS:
        held = [(other, *_range(np.dtype(_STORAGE[other]))) for other in _INTEGERS]
        wires |= {BOOL, *(other for other, least, most in held if least >= low and most <= high)}
    elif code in (FLOAT32, FLOAT64):
        wires |= {FLOAT16, BFLOAT16}
    unsigned = np.dtype(f"<u{storage.itemsize}")
    types = (_NAMES[code], storage, unsigned, storage.itemsize)
    return DType(code, *types, _EXPONENTS.get(code, 0), low, high, frozenset(wires))


def _range(storage: np.dtype[Any]) -> tuple[int, int]:
    info = np.iinfo(storage)
    return int(info.min), int(info.max)


DTYPES: Final = tuple(_make_dtype(code) for code in range(len(_NAMES)))
