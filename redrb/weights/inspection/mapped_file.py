"""A safetensors file whose tensors are written in place: what is received lands in the file."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from redrb.errors import EncodeError
from redrb.weights.files.safetensors import replacing, safetensors_torch
from redrb.weights.tensors.dtypes import dtype_of
from redrb.weights.wire.layout import Layout, TensorEntry

_DTYPES: Final[Mapping[str, str]] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}
"""Safetensors' words, of dtypes that every version of it reads."""

_HEAD = 8  # the header's length, before the header
_WORD = 8  # to a multiple of which the header is padded


@contextmanager
def mapped_file(
    target: Path, layout: Layout, *, metadata: Mapping[str, str]
) -> Iterator[dict[str, Tensor]]:
    """Give the tensors of a new file, which gets the name of `target` when the block ends well.

    Tied ones are one tensor, kept under the first of their names in the alphabet as
    `save_safetensors` does.

    Args:
        target: Of the file.
        layout: What is in it.
        metadata: Texts for its header.

    Raises:
        EncodeError: safetensors has no such dtype.
        ConfigError: The file cannot be written, or safetensors is not installed.
    """
    safetensors_torch()
    kept = _kept(layout)
    header, places, nbytes = _header(layout, kept, metadata)
    with replacing(target) as fresh:
        with fresh.open("r+b") as file:
            # room for all of it: a write to a mapping on a full disk would kill the process
            os.posix_fallocate(file.fileno(), 0, len(header) + nbytes)
            file.write(header)
            file.flush()
            memory = mmap.mmap(file.fileno(), len(header) + nbytes)
        yield _tensors(layout, kept, memory, {n: len(header) + at for n, at in places.items()})
        memory.flush()


def _kept(layout: Layout) -> dict[str, str]:
    """Return for each tensor the name under which it is written."""
    first: dict[str, str] = {}
    for entry in layout.tensors:
        owner = entry.alias or entry.name
        first[owner] = min(first.get(owner, entry.name), entry.name)
    return {entry.name: first[entry.alias or entry.name] for entry in layout.tensors}


def _header(
    layout: Layout, kept: Mapping[str, str], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """Return the file's first bytes, where tensors begin after them, and how many bytes follow."""
    written = [entry for entry in layout.tensors if kept[entry.name] == entry.name]
    for entry in written:
        if entry.dtype not in _DTYPES:
            raise EncodeError(f"{entry.name!r} is {entry.dtype}: safetensors files have no such.")
    about = {key: text for key, text in metadata.items() if text not in kept and key not in kept}
    ties = {name: owner for name, owner in kept.items() if name != owner}
    listed: dict[str, Any] = {"__metadata__": {"format": "pt", **about, **ties}}
    places: dict[str, int] = {}
    end = 0
    # the widest first, as safetensors does, so that every tensor is aligned
    for entry in sorted(written, key=lambda entry: (-entry.item_bytes, entry.name)):
        places[entry.name] = end
        listed[entry.name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [end, end + entry.nbytes],
        }
        end += entry.nbytes
    text = json.dumps(listed, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _WORD)
    return len(text).to_bytes(_HEAD, "little") + text, places, end


def _tensors(
    layout: Layout, kept: Mapping[str, str], memory: mmap.mmap, places: Mapping[str, int]
) -> dict[str, Tensor]:
    flat = np.frombuffer(memory, np.uint8)
    found: dict[str, Tensor] = {}
    for entry in layout.tensors:
        name = kept[entry.name]
        if name not in found:
            found[name] = _tensor(entry, flat, places[name])
    return {name: found[owner] for name, owner in kept.items()}


def _tensor(entry: TensorEntry, flat: Any, begin: int) -> Tensor:
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype_of(entry))
    part = torch.from_numpy(flat[begin : begin + entry.nbytes])
    return part.view(dtype_of(entry)).reshape(entry.shape)
