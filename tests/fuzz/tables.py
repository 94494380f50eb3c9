"""Values and tags of tables: read or refused, and no unsigned pickle is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import torch

from redrb.errors import DecodeError, RecordError
from redrb.table.rows import Cells, Rows
from redrb.table.values import PICKLE, TagReader, Values, pack_tags

_SIGNED = Values("secret")
_KEYS = ("a", "b")


class _Loaded(Exception):
    """A pickle was loaded."""


def one_input(data: bytes) -> None:
    """Read the same bytes as a value, as a column of two rows, and as tags."""
    if data[:1] == bytes([PICKLE]) and data not in _pickles():
        try:
            _SIGNED.decode("x", "a", memoryview(data))
        except DecodeError:
            return
        raise _Loaded(data)
    for stored in ((data, data), (data[: len(data) // 2], data[len(data) // 2 :])):
        column = Cells(stored, (0, 0), tuple(map(len, stored)))
        rows = Rows(_KEYS, {"x": column}, _SIGNED)
        for read in (rows.__getitem__, rows.stacked):
            with suppress(DecodeError, RecordError):
                assert len(read("x")) == len(_KEYS)
        with suppress(DecodeError, RecordError):
            assert rows.batch().keys() == {"x"}
    with suppress(DecodeError):
        key, tags = TagReader().read(data)
        pack_tags(key, {name: None for name in tags if name.isprintable() and name})


def _pickles() -> list[bytes]:
    return [b"".join(row) for row in _SIGNED.encode_column("x", [(1, 2)], ["a"])]


def seeds() -> Iterator[bytes]:
    """Yield a value of each kind, and tags."""
    values = [torch.arange(6).reshape(2, 3), torch.ones(3, dtype=torch.bfloat16), np.ones((2, 2))]
    for value in (*values, {"a": [1, b"x", None]}, "text"):
        yield b"".join(_SIGNED.encode_column("x", [value], ["a"])[0])
    yield from _pickles()
    yield pack_tags("a", {"status": "done", "n": 1, "list": [1, {"b": 0.5}]})
