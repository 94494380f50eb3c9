"""Tensors of uint8 as PNG files."""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from redrb.browse.choice import Limits
from redrb.browse.records import ImageView

_COLOURS: Final = {1: 0, 3: 2, 4: 6}
"""Channels -> PNG's type of colours: grey, RGB, RGB with opacity."""

_LEAST_SIDE: Final = 2
"""Smaller tensors are numbers, not pictures."""


def images_of(name: str, array: NDArray[Any], limits: Limits) -> list[ImageView]:
    """Return the images in a tensor: (C, H, W) or (H, W, C), or several of these.

    C is 1, 3 or 4. Where both orders fit, the first dimension is taken as C.
    """
    if array.dtype != np.uint8 or array.ndim not in (3, 4):
        return []
    several = array if array.ndim == 4 else array[np.newaxis]
    made = []
    for number, each in enumerate(several[: limits.images]):
        pixels = _pixels(each)
        if pixels is None:
            return []
        small = _reduced(pixels, limits.pixels)
        shown = name if array.ndim == 3 else f"{name}[{number}]"
        made.append(ImageView(shown, small.shape[1], small.shape[0], png(small)))
    return made


def png(pixels: NDArray[Any]) -> bytes:
    """Return the PNG file of pixels, uint8 (H, W, C) with 1, 3 or 4 channels."""
    height, width, channels = pixels.shape
    head = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # each row begins with filter 0
    rows[:, 1:] = pixels.reshape(height, width * channels)
    body = zlib.compress(rows.tobytes(), 6)
    chunks = (_chunk(b"IHDR", head), _chunk(b"IDAT", body), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _pixels(array: NDArray[Any]) -> NDArray[Any] | None:
    """Return an image as (H, W, C); None if the tensor is none."""
    if array.shape[0] in _COLOURS and min(array.shape[1:]) >= _LEAST_SIDE:
        return array.transpose(1, 2, 0)
    if array.shape[2] in _COLOURS and min(array.shape[:2]) >= _LEAST_SIDE:
        return array
    return None


def _reduced(pixels: NDArray[Any], most: int) -> NDArray[Any]:
    """Return every n-th pixel, with n so large that at most `most` remain."""
    height, width, _ = pixels.shape
    step = max(1, math.ceil(math.sqrt(height * width / most)))
    while -(-height // step) * -(-width // step) > most:
        step *= 2
    return pixels[::step, ::step]
