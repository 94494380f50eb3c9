"""The decoder of groups: both kernels give the same tensors, or both refuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from redrb.codec import decode_batch, decode_items, kernels, parse_group, plain
from redrb.errors import DecodeError, RecordError

COMPILED = kernels.kernel
GOLDEN = Path(__file__).parents[1] / "unit" / "golden"


def one_input(data: bytes) -> None:
    """Decode one blob with both kernels."""
    try:
        assert _outcome(data, COMPILED) == _outcome(data, plain)
    finally:
        kernels.kernel = COMPILED


def seeds() -> Iterator[bytes]:
    """Yield the golden blobs."""
    for blob in sorted(GOLDEN.glob("*.bin")):
        yield blob.read_bytes()


def _outcome(data: bytes, kernel: kernels.Kernel) -> list[bytes] | None:
    """Return the decoded tensors' bytes; None where the blob was refused."""
    kernels.kernel = kernel
    try:
        layout = parse_group(data)
    except DecodeError:
        return None
    if layout.decoded_bytes > 1 << 20:
        return []
    items = decode_items(layout)
    for side in ("left", "right"):
        try:
            decode_batch([layout, layout], side=side)
        except RecordError:
            continue
    tensors = [tensor for item in items for tensor in item.tensors.values()]
    tensors += [item.sequences for item in items if item.sequences is not None]
    return [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
