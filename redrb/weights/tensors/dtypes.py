"""Dtypes of the wire and torch's: by name, and which are cast into each other."""

from __future__ import annotations

import torch

from redrb.errors import ConfigError, WeightError
from redrb.weights.wire.layout import ITEM_BYTES, TensorEntry

# some of float8 and float4 came with later versions of torch
DTYPE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in ITEM_BYTES if hasattr(torch, name)
}
_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
CASTABLE = frozenset({"float16", "bfloat16", "float32", "float64"})


def published_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype to which tensors are cast before they are published.

    Args:
        dtype: torch's, or its name.

    Raises:
        ConfigError: It is not a floating-point dtype.
    """
    if dtype is None:
        return None
    name = DTYPE_NAMES.get(dtype) if isinstance(dtype, torch.dtype) else dtype
    if not isinstance(name, str) or name not in CASTABLE:
        raise ConfigError(
            f"dtype={dtype!r}: floating-point tensors are cast to {sorted(CASTABLE)}."
        )
    return _DTYPES[name]


def dtype_of(entry: TensorEntry) -> torch.dtype:
    """Return torch's dtype of a tensor.

    Raises:
        WeightError: This torch does not know it.
    """
    if entry.dtype not in _DTYPES:
        raise WeightError(f"{entry.name!r} is {entry.dtype}: this version of torch has none.")
    return _DTYPES[entry.dtype]
