"""Reads and writes the memory of tensors at addresses that the caller keeps alive."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from redrb.codec.dtypes import BFLOAT16, DType, Storage


def memory(address: int, dtype: DType, count: int) -> Storage:
    """Return `count` elements at an address that the caller keeps alive."""
    if count == 0:
        return np.empty(0, dtype.storage)
    raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    found: Storage = np.frombuffer(memoryview(raw), dtype.storage)
    return found


def widened(stored: Storage, wire: int) -> Storage:
    """Return float16 or bfloat16 elements as numbers that fit into wider floats."""
    if wire == BFLOAT16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.view(np.float16)


def bits_of(value: int, dtype: DType) -> Any:
    """Return a value of a header as one element, by its bits."""
    return np.array(value & (1 << 8 * dtype.itemsize) - 1, np.uint64).astype(dtype.storage)
