"""Images of a coloured square on the left or on the right side."""

from __future__ import annotations

import random

import torch
from torch import Tensor

SIDE = 8
"""Pixels of an image in each direction."""

SQUARE = 3
"""Pixels of the square in each direction."""


def draw(channel: int, side: int, numbers: random.Random, *, noise: int) -> Tensor:
    """Return an image, uint8 `[1, 8, 8, 3]`.

    The first dimension is that along which the images of a batch are joined.

    Args:
        channel: Colour of the square: 0 red, 1 green, 2 blue.
        side: Half in which the square is: 0 left, 1 right.
        numbers: Source of the place and of the noise.
        noise: Largest value of a pixel's channel in the background.
    """
    count = SIDE * SIDE * 3
    flat = torch.tensor([numbers.randint(0, noise) for _ in range(count)], dtype=torch.uint8)
    image = flat.view(1, SIDE, SIDE, 3)
    top = numbers.randint(0, SIDE - SQUARE)
    left = numbers.randint(0, SIDE // 2 - SQUARE) + side * SIDE // 2
    image[0, top : top + SQUARE, left : left + SQUARE, channel] = 255
    return image
