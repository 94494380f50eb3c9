"""torch's dtypes for the names on the wire, and the dtypes that may be cast into each other."""

from __future__ import annotations

import torch

from redrb.errors import ConfigError, WeightError
from redrb.weights.wire.layout import ITEM_BYTES, TensorEntry

# older versions of torch lack some of float8 and float4
DTYPE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in ITEM_BYTES if hasattr(torch, name)
}
_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
CASTABLE = frozenset({"float16", "bfloat16", "float32", "float64"})


def published_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype that tensors are cast to before they are published, or raise ConfigError."""
    if dtype is None:
        return None
    name = DTYPE_NAMES.get(dtype) if isinstance(dtype, torch.dtype) else dtype
    if not isinstance(name, str) or name not in CASTABLE:
        raise ConfigError(f"dtype={dtype!r}: give one of {sorted(CASTABLE)}.")
    return _DTYPES[name]


def dtype_of(entry: TensorEntry) -> torch.dtype:
    """Return the torch.dtype of a published tensor, or raise WeightError."""
    if entry.dtype not in _DTYPES:
        raise WeightError(
            f"{entry.name!r} is {entry.dtype}, which this version of torch does not have."
        )
    return _DTYPES[entry.dtype]
