"""`Watch`: notices, before a commit, tensors that have changed while they were sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import Tensor

from redrb.errors import EncodeError
from redrb.weights.tensors.state import StateBytes
from redrb.weights.wire.chunks import checksum_of

HEAD_BYTES: Final = 64 << 10
"""First bytes of a chunk, which are looked at again: an optimizer's step changes some of them."""


def changed(what: str) -> EncodeError:
    """Return the error about tensors of which one part was sent before a change, one after it."""
    return EncodeError(
        f"{what} changed while it was published: do not train, and load nothing into the model, "
        "until publish returns. Nothing was published."
    )


class Watch:
    """Compares tensors with what they were when a publish began.

    It looks at torch's count of the writes to each tensor, and at the first `HEAD_BYTES` of each
    chunk. Writes past torch, such as those through `.data` or numpy, and to tensors of
    `torch.inference_mode`, are not counted.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin, before the first byte of a tensor is read."""
        self._tensors = tensors
        self._writes = _writes(tensors)
        self._source: StateBytes | None = None
        self._heads: list[int] = []

    def begin(self, source: StateBytes) -> None:
        """Look at the bytes that are to be sent."""
        self._source, self._heads = source, _heads(source)

    def check(self) -> None:
        """Raise EncodeError if a tensor has changed."""
        now = _writes(self._tensors)
        for name, writes in self._writes.items():
            if now[name] != writes:
                raise changed(f"tensor {name!r:.200}")
        if self._source is not None and _heads(self._source) != self._heads:
            raise changed("a tensor")


def _writes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {
        name: each._version  # noqa: SLF001 (torch's counter)
        for name, each in tensors.items()
        if not each.is_inference()
    }


def _heads(source: StateBytes) -> list[int]:
    chunks = range(source.layout.chunks)
    return [checksum_of(source.head(index, HEAD_BYTES)) for index in chunks]
