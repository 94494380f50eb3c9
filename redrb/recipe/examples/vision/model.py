"""Images of coloured squares, and a small decoder that sees an image before its tokens."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

SIDE = 8
"""Pixels of an image in each direction."""

SQUARE = 3
"""Pixels of the square in each direction."""


def draw(channel: int, side: int, numbers: random.Random, *, noise: int) -> Tensor:
    """Return an image, uint8 `[1, 8, 8, 3]`.

    The first dimension is that along which the images of a batch are joined.
    """
    count = SIDE * SIDE * 3
    flat = torch.tensor([numbers.randint(0, noise) for _ in range(count)], dtype=torch.uint8)
    image = flat.view(1, SIDE, SIDE, 3)
    top = numbers.randint(0, SIDE - SQUARE)
    left = numbers.randint(0, SIDE // 2 - SQUARE) + side * SIDE // 2
    image[0, top : top + SQUARE, left : left + SQUARE, channel] = 255
    return image


LONGEST = 8

PATCHES = 4
"""Vectors of an image in the sequence."""


class SeeingDecoder(nn.Module):
    """Patches of an image by convolutions, then causal attention over patches and tokens.

    `redrb.algorithms.models` says how models are called: they get `pixel_values` because `forward`
    names it.
    """

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.patches = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 4, stride=4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * width, PATCHES * width),
            nn.Unflatten(1, (PATCHES, width)),
        )
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(LONGEST, width)
        self.block = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> Tensor:
        """Return logits, float32 `[B, S, V]`.

        Args:
            input_ids: Token ids, int64 `[B, S]`.
            attention_mask: 1 where a token counts, int64 `[B, S]`.
            pixel_values: An image of each sample, uint8 `[B, height, width, 3]`.
        """
        image = self.patches(pixel_values.permute(0, 3, 1, 2) / 255)
        places = (attention_mask.cumsum(1) - 1).clamp(0, LONGEST - 1)
        hidden = torch.cat([image, self.tokens(input_ids) + self.places(places)], 1)
        counts = torch.cat([attention_mask.new_ones(image.shape[:2]), attention_mask], 1).bool()
        length = hidden.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
        hidden = self.block(hidden, src_mask=later, src_key_padding_mask=~counts, is_causal=False)
        logits: Tensor = self.head(hidden[:, PATCHES:])
        return logits
