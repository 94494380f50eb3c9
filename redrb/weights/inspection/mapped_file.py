"""A safetensors file that is mapped into memory, so that tensors are received straight into it."""

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
from redrb.weights.files.safetensors import (
    METADATA,
    check_tensor_name,
    replacing,
    safetensors_torch,
)
from redrb.weights.tensors.dtypes import dtype_of
from redrb.weights.wire.layout import Layout

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
"""Names in safetensors of the dtypes that every version of it reads."""

_HEAD = 8  # bytes of the header's length, before the header
_WORD = 8  # the header is padded to a multiple of this


@contextmanager
def mapped_file(
    target: Path, layout: Layout, *, metadata: Mapping[str, str]
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of a new file, which is renamed to `target` if the block ends well.

    Tied tensors are stored once, under the first of their names in the alphabet, as
    `save_safetensors` does.

    Args:
        target: Path of the file.
        layout: Layout of the tensors.
        metadata: Texts for the file's header.

    Raises:
        EncodeError: safetensors does not support a dtype.
        ConfigError: The file cannot be written, or safetensors is not installed.
    """
    safetensors_torch()
    kept = _kept(layout)
    header, places, nbytes = _header(layout, kept, metadata)
    with replacing(target) as fresh:
        with fresh.open("r+b") as file:
            # allocated first: a write to a map on a full disk would kill the process (SIGBUS)
            os.posix_fallocate(file.fileno(), 0, len(header) + nbytes)
            file.write(header)
            file.flush()
            memory = mmap.mmap(file.fileno(), len(header) + nbytes)
        yield _tensors(layout, kept, memory, {n: len(header) + at for n, at in places.items()})
        memory.flush()


def _kept(layout: Layout) -> dict[str, str]:
    """Return the name under which each tensor is written."""
    first: dict[str, str] = {}
    for entry in layout.tensors:
        owner = entry.alias or entry.name
        first[owner] = min(first.get(owner, entry.name), entry.name)
    return {entry.name: first[entry.alias or entry.name] for entry in layout.tensors}


def _header(
    layout: Layout, kept: Mapping[str, str], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """Return the header, each tensor's offset after it, and the bytes of all tensors."""
    for name in kept:
        check_tensor_name(name)
    written = [entry for entry in layout.tensors if kept[entry.name] == entry.name]
    for entry in written:
        if entry.dtype not in _DTYPES:
            raise EncodeError(
                f"{entry.name!r} is {entry.dtype}, which safetensors files do not support."
            )
    about = {key: text for key, text in metadata.items() if text not in kept and key not in kept}
    ties = {name: owner for name, owner in kept.items() if name != owner}
    listed: dict[str, Any] = {METADATA: {"format": "pt", **about, **ties}}
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
            part = torch.from_numpy(flat[places[name] : places[name] + entry.nbytes])
            found[name] = part.view(dtype_of(entry)).reshape(entry.shape)
    return {name: found[owner] for name, owner in kept.items()}
