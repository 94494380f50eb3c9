"""`Sampler`: chooses the next token from its logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from redrb.errors import ConfigError


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampler:
    """Settings of sampling.

    Attributes:
        do_sample: False takes the likeliest token each time.
        temperature: Divides the logits, > 0.
        top_k: Sample only among the k likeliest tokens; None or 0: all.
        top_p: Sample only among the likeliest tokens that together reach this probability, with
            the token that reaches it (Holtzman et al. 2020, arXiv:1904.09751); None or 1: all.
        generator: Source of randomness, on any device; the same state gives the same completions.
            None: torch's global generator.
    """

    do_sample: bool = True
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if not (0 < self.temperature < math.inf):
            raise ConfigError(f"temperature {self.temperature} must be positive and finite.")
        if self.top_k is not None and self.top_k < 0:
            raise ConfigError(f"top_k {self.top_k} must be at least 1, or None for all tokens.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p {self.top_p} must be above 0 and at most 1.")

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose one token for each row.

        Args:
            logits: Any float dtype, `[B, V]`.

        Returns:
            Token ids, int64 `[B]`, and their log-probabilities at the temperature, float32 `[B]`,
            without the effect of `top_k` and `top_p`.
        """
        log_probs = (logits.float() / self.temperature).log_softmax(-1)
        if self.do_sample:
            chosen = self._draw(self._cut(log_probs).exp())
        else:
            chosen = log_probs.argmax(-1, keepdim=True)
        return chosen.squeeze(-1), log_probs.gather(-1, chosen).squeeze(-1)

    def _draw(self, weights: Tensor) -> Tensor:
        """Draw from unnormalised probabilities `[B, V]` on the generator's device."""
        generator = self.generator
        device = weights.device if generator is None else generator.device
        drawn = torch.multinomial(weights.to(device), 1, generator=generator)
        return drawn.to(weights.device)

    def _cut(self, log_probs: Tensor) -> Tensor:
        """Return `log_probs` with -inf for tokens that `top_k`, then `top_p`, exclude."""
        vocabulary = log_probs.shape[-1]
        if self.top_k and self.top_k < vocabulary:
            least = log_probs.topk(self.top_k).values[:, -1:]
            log_probs = log_probs.masked_fill(log_probs < least, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = log_probs.softmax(-1).sort(descending=True)
            cut = ordered.cumsum(-1) - ordered >= self.top_p
            cut[:, 0] = False
            log_probs = log_probs.masked_fill(cut.scatter(-1, order, cut), -torch.inf)
        return log_probs
