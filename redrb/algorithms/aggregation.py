"""Means over the actions or samples of a batch, also of a batch that is trained part by part.

In all functions `mask` is True where an action counts, bool `[B, A]`; values elsewhere have no
effect, not even nan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias, get_args

import torch
from torch import Tensor

from redrb.errors import ConfigError

Aggregation: TypeAlias = Literal["token", "sequence"]
"""How losses of actions become one number: "token" is the mean over all actions of the batch
(DAPO), so long samples weigh more; "sequence" is the mean over samples of each sample's mean (GRPO,
`coati`)."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Divisors of the means of a whole batch, for a part of it.

    A part's sums divided by these numbers add up to the means of the whole batch, so the gradients
    of all parts add up to that of the whole batch.

    Attributes:
        actions: Actions that count in the whole batch, a number `[]`.
        samples: Samples with such an action, `[]`.
        rows: All samples, `[]`.
    """

    actions: Tensor
    samples: Tensor
    rows: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> Self:
        """Return the totals of a batch that is trained as a whole."""
        return cls(mask.sum(), mask.any(1).sum(), mask.new_tensor(mask.shape[0], dtype=torch.int64))

    def of_ranks(self, mean: Callable[[Tensor], Tensor]) -> Totals:
        """Return the mean of the totals over ranks, whose gradients are averaged.

        Args:
            mean: Averages numbers `[N]` over the ranks.
        """
        counts = torch.stack([self.actions, self.samples, self.rows])
        return Totals(*mean(counts.float()).unbind())


def aggregate(
    losses: Tensor,
    mask: Tensor,
    *,
    aggregation: Aggregation = "token",
    weights: Tensor | None = None,
    totals: Totals | None = None,
) -> Tensor:
    """Return the weighted mean of the losses `[B, A]` where `mask` is True, float32 `[]`.

    Weights multiply the losses without division by their sum, as in importance sampling. Samples
    without an action that counts are left out; if nothing counts, the mean is 0.

    Args:
        losses: Loss of each action, `[B, A]`.
        mask: True where an action counts.
        aggregation: How losses of actions become one number.
        weights: Importance weight of each sample or action, `[B, 1]` or `[B, A]`.
        totals: Of the whole batch, where this is a part of it: the result is the part's share of
            the mean. None: this is the whole batch.

    Raises:
        ConfigError: The aggregation is unknown.
    """
    check_choice("aggregation", aggregation, get_args(Aggregation))
    totals = totals or Totals.of(mask)
    losses = losses.masked_fill(~mask, 0.0)
    if weights is not None:
        losses = losses * torch.where(mask, weights, 0.0)
    if aggregation == "token":
        return losses.sum() / _divisor(totals.actions)
    rows = losses.sum(1) / mask.sum(1).clamp(min=1)
    return rows.sum() / _divisor(totals.samples)


def masked_mean(values: Tensor, mask: Tensor, totals: Totals | None = None) -> Tensor:
    """Return the mean of the values where `mask` is True, float32 `[]`; 0 if it is nowhere True."""
    return aggregate(values, mask, totals=totals)


def row_mean(values: Tensor, totals: Totals) -> Tensor:
    """Return the mean of numbers of samples `[B]`, or of a part its share of it, float32 `[]`."""
    return values.sum() / _divisor(totals.rows)


def normalised(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return advantages with mean 0 and variance 1 over the actions that count, `[B, A]`.

    Computed in float64: of equal advantages in float32 a rounding error would be left, which the
    division makes large. Equal advantages become 0. The divisor's 1e-8 is that of TRL's and
    OpenAI's `whiten`.
    """
    exact = advantages.double()
    counted = exact[mask]
    if not counted.numel() or bool(counted.min() == counted.max()):
        return torch.zeros_like(advantages)
    variance, mean = torch.var_mean(counted, correction=0)
    return ((exact - mean) / (variance.sqrt() + 1e-8)).to(advantages.dtype)


def _divisor(count: Tensor) -> Tensor:
    """Return a count by which sums can be divided: 1 for none, of which the sums are 0."""
    return torch.where(count > 0, count, torch.ones_like(count))


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless `value` is one of the choices."""
    if value not in choices:
        raise ConfigError(f"{name} {value!r} is none of {', '.join(choices)}.")
