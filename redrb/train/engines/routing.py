"""Routed experts: the experts of each layer that a token has passed, as a server tells them."""

from __future__ import annotations

import re
from base64 import b64decode
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Routing: TypeAlias = NDArray[Any]
"""Numbers of experts, one row a token: `[tokens, layers, experts per token]`."""

_HEAD = re.compile(
    rb"\x93NUMPY\x01\x00(?s:..)"
    rb"\{'descr': '(\|u1|<u2|<i4)', 'fortran_order': (False|True), "
    rb"'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\), \} *\n"
)
"""The beginning of the only files that are read: numpy's own reader evaluates it as Python."""


def decoded(text: object, most: int) -> Routing | None:
    """Return the rows that a server sends as a file of `numpy.save` in base64; None if it has none.

    Args:
        text: The file, from an untrusted source.
        most: Most rows.

    Raises:
        ValueError: It is no such file.
    """
    if text is None:
        return None
    data = b64decode(text, validate=True) if isinstance(text, str) else b""
    head = _HEAD.match(data)
    if head is None:
        raise ValueError("no array of uint8, uint16 or int32 with three dimensions")
    dtype = np.dtype(head[1].decode())
    rows, layers, experts = map(int, head.groups()[2:])
    size = rows * layers * experts * dtype.itemsize
    if rows > most or not layers or not experts or len(data) - head.end() != size:
        raise ValueError(f"{len(data)} bytes for {rows} of {most} tokens")
    found = np.frombuffer(data, dtype, offset=head.end())
    if rows and found.min() < 0:
        raise ValueError("a number below 0")
    return found.reshape(rows, layers, experts, order="F" if head[2] == b"True" else "C")


def rows_of(routing: Routing | None) -> int:
    """Return for how many tokens experts are known."""
    return 0 if routing is None else len(routing)


def joined(known: Routing | None, start: int, part: Routing | None, tokens: int) -> Routing | None:
    """Return the known rows with those that a further part adds.

    Args:
        known: Rows of the tokens from `start` on; they stay as they are.
        part: Rows up to that of the last token but one.
        tokens: Tokens after this part.

    Raises:
        ValueError: Rows are missing in between, or the part has another shape or dtype.
    """
    if part is None:
        return known
    end = start + rows_of(known)
    more = part[max(0, end - (tokens - 1 - len(part))) :]
    if end + len(more) < tokens - 1:
        raise ValueError(f"{len(part)} rows of {tokens} tokens leave a gap after {end}")
    if known is None:
        return more
    if (part.dtype, part.shape[1:]) != (known.dtype, known.shape[1:]):
        raise ValueError(f"{part.dtype} {part.shape[1:]} after {known.dtype} {known.shape[1:]}")
    return np.concatenate((known, more))
