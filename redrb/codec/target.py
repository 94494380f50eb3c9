"""Decodes samples into an array: runs, copies and conversions of bodies."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from redrb.codec.layout import Piece
from redrb.codec.wire import BFLOAT16, BOOL, DTYPES, FLOAT64, UINT64, DType, Storage, storage_of


class Target:
    """An array that samples are decoded into."""

    def __init__(self, array: Storage, dtype: DType) -> None:
        self.array = array
        self.dtype = dtype
        self.itemsize = dtype.itemsize
        self.bytes = self.array.view(np.uint8).data

    def write(self, blob: memoryview, wire: int, piece: Piece, at: int) -> None:
        """Decode one sample to the elements from `at` on."""
        _, count, lead, lead_value, trail, trail_value, start, end = piece
        if lead:
            self.array[at : at + lead] = lead_value
            at += lead
        if count and wire == self.dtype.code and wire != BOOL:
            self.bytes[at * self.itemsize : (at + count) * self.itemsize] = blob[start:end]
        elif count:
            self.convert(blob[start:end], wire, at, count)
        if trail:
            at += count
            self.array[at : at + trail] = trail_value

    def convert(self, body: memoryview, wire: int, at: int, count: int) -> None:
        """Decode a body that is stored as another dtype."""
        stored = np.frombuffer(body, DTYPES[wire].storage)
        if wire == BOOL:
            self.array[at : at + count] = np.unpackbits(stored, count=count, bitorder="little")
        elif self.dtype.code <= UINT64:
            self.array[at : at + count] = stored
        else:
            floats = np.float64 if self.dtype.code == FLOAT64 else np.float32
            self.array.view(floats)[at : at + count] = _widened(stored, wire)


def _widened(stored: Storage, wire: int) -> NDArray[np.floating[Any]]:
    """Return float16 or bfloat16 bodies as numbers."""
    if wire == BFLOAT16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.view(np.float16)


def bits_of(value: int, dtype: DType) -> int:
    """Return the bit pattern of `value` as this dtype."""
    return int(storage_of(torch.full((1,), value, dtype=dtype.tensor), dtype)[0]) if value else 0
