"""Rows of a batch that was padded on the right, rotated so that they end together."""

from __future__ import annotations

import torch
from torch import Tensor


def trailing(marks: Tensor) -> Tensor:
    """Return the number of entries after each row's last mark, int64 `[B]`; 0 without a mark."""
    length = marks.shape[1]
    places = torch.arange(1, length + 1, device=marks.device)
    last = (places * marks).amax(1)
    return torch.where(last > 0, length - last, 0)


def rolled(tensor: Tensor, by: Tensor) -> Tensor:
    """Return each row of `[B, T]` rotated to the right by its entry in `by`, int64 `[B]`."""
    return tensor.gather(1, rolled_places(tensor, by))


def rolled_places(tensor: Tensor, by: Tensor) -> Tensor:
    """Return the indices, int64 `[B, T]`, by which `gather` rotates the rows of a tensor."""
    length = tensor.shape[1]
    return (torch.arange(length, device=tensor.device) - by[:, None]) % length
