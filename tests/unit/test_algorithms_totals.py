"""Means over ranks: those of the whole batch, however it is divided among the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from redrb.algorithms.losses import Totals, aggregate, row_mean

RANKS = [
    [[3, 2, 5, 1, 4], [0, 0]],  # actions of each sample of each rank
    [[0, 0, 0], [0]],
    [[1], [0, 6, 0, 2], [5, 5]],
    [[1, 0], [0, 0, 0], [0]],
]


def masked(lengths: Sequence[int]) -> Tensor:
    return torch.arange(6)[None] < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_shares_of_ranks_average_to_the_mean_of_the_whole(ranks, aggregation):
    torch.manual_seed(0)
    masks = [masked(lengths) for lengths in ranks]
    losses = [torch.randn(mask.shape, dtype=torch.float64) for mask in masks]
    counts = [
        torch.stack([own.actions, own.samples, own.rows]).double()
        for own in (Totals.of(mask) for mask in masks)
    ]
    totals = Totals.of(masks[0]).of_ranks(lambda _: torch.stack(counts).mean(0))
    shares = [
        aggregate(each, mask, aggregation=aggregation, totals=totals)
        for each, mask in zip(losses, masks, strict=True)
    ]
    whole = aggregate(torch.cat(losses), torch.cat(masks), aggregation=aggregation)
    torch.testing.assert_close(torch.stack(shares).mean(), whole)
    rewards = [torch.randn(len(lengths), dtype=torch.float64) for lengths in ranks]
    found = torch.stack([row_mean(each, totals) for each in rewards]).mean()
    torch.testing.assert_close(found, torch.cat(rewards).mean())
