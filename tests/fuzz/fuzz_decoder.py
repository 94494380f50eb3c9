"""Fuzzes the decoder: bytes are a valid group, which decodes in every way, or a DecodeError.

    pip install atheris
    python -m tests.fuzz.fuzz_decoder -max_total_time=600 CORPUS_DIRECTORY

The corpus begins with the golden blobs. Both kernels must say the same of every input.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris
import torch

with atheris.instrument_imports(include=["redrb.codec"]):
    from redrb.codec import decode_batch, decode_items, kernels, parse_group, plain
    from redrb.errors import DecodeError, RecordError

COMPILED = kernels.kernel


def outcome(data: bytes, kernel: kernels.Kernel) -> list[bytes] | None:
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


def one_input(data: bytes) -> None:
    """Try one input on both kernels."""
    assert outcome(data, COMPILED) == outcome(data, plain)


def main() -> None:
    """Fuzz until the time is over."""
    golden = Path(__file__).parents[1] / "unit" / "golden"
    corpus = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if corpus:
        directory = Path(corpus[0])
        directory.mkdir(exist_ok=True)
        for blob in golden.glob("*.bin"):
            (directory / blob.name).write_bytes(blob.read_bytes())
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
