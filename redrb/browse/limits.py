"""`Limits`: how much of a group is decoded and shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of what is shown of one group; what is beyond is cut, with a note.

    Attributes:
        group_bytes: Bytes of a group; a larger one is not read.
        tensor_bytes: Decoded bytes of one tensor; of a larger one only the shape is shown.
        decoded_bytes: Decoded bytes of all tensors; of those beyond, only the shapes are shown.
        samples: Samples.
        tokens: Tokens of a prompt, and of a response.
        text: Characters of one text; all texts of a group have eight times as many.
        entries: Entries of a list or map in extras.
        images: Images of a sample.
        pixels: Pixels of an image; a larger one is made smaller.
    """

    group_bytes: int = 64 << 20
    tensor_bytes: int = 16 << 20
    decoded_bytes: int = 256 << 20
    samples: int = 64
    tokens: int = 16_384
    text: int = 32_768
    entries: int = 1_000
    images: int = 8
    pixels: int = 1 << 20


LIMITS = Limits()
