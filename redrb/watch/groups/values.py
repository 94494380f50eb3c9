"""Values of groups for people: tensors as arrays and images, extras as JSON can hold them."""

from __future__ import annotations

import math
import struct
import zlib
from datetime import datetime
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from redrb.codec.kernels import Group
from redrb.codec.layout import Field
from redrb.watch.groups.choice import Limits
from redrb.watch.groups.records import FieldView, ImageView

_KEY: Final = 256


class PlainValues:
    """Makes plain values of one group's extras and tags."""

    def __init__(self, limits: Limits) -> None:
        self.cut = 0
        self._limits = limits
        self._text = 8 * limits.text
        self._entries = limits.entries

    def of(self, value: Any) -> Any:
        """Return a value; bytes, times and numbers that are not finite become texts."""
        if isinstance(value, str):
            return self._short(value)
        if isinstance(value, dict):
            return {
                (key if isinstance(key, str) else repr(key))[:_KEY]: self.of(each)
                for key, each in self._first(list(value.items()))
            }
        if isinstance(value, list | tuple):
            return [self.of(each) for each in self._first(value)]
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, bytes):
            return f"<{len(value):,} bytes>"
        return value.isoformat() if isinstance(value, datetime) else f"<{type(value).__name__}>"

    def _short(self, text: str) -> str:
        """Return a text, cut; all texts of a group together are bounded too."""
        most = max(min(self._limits.text, self._text), 0)
        self._text -= min(len(text), most)
        if len(text) <= most:
            return text
        self.cut += 1
        return f"{text[:most]}… ({len(text):,} characters)"

    def _first(self, values: Any) -> Any:
        most = max(self._entries, 0)
        self._entries -= min(len(values), most)
        if len(values) > most:
            self.cut += 1
        return values[:most]


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
