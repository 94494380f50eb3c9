"""Sampling completions from an actor, batched, and scoring it on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redrb.errors import ConfigError
from workers.policy import Actor
from workers.sorting import EOS, MAX_NEW_TOKENS, PAD, pad_prompts, reward

EVALUATION_SEED = 7


@dataclass(frozen=True, eq=False)
class Completions:
    """Prompts with sampled completions: prompts end, and completions start, at S - A.

    Attributes:
        sequences: Prompt padded on the left, completion padded on the right, int64 `[B, S]`.
        attention_mask: 1 on prompt and completion, int64 `[B, S]`.
        action_mask: True on the completion, its EOS included, bool `[B, A]`.
        action_log_probs: Log-probability of each sampled token, 0 on padding, float32 `[B, A]`.
    """

    sequences: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    action_log_probs: Tensor

    def completion(self, row: int) -> Tensor:
        """Return the tokens that were sampled in `row`, int64 `[its own length]`."""
        actions = self.action_mask.shape[1]
        return self.sequences[row, -actions:][self.action_mask[row]]


@torch.no_grad()
def generate(
    actor: Actor,
    prompts: Sequence[Tensor],
    *,
    generator: torch.Generator,
    max_new_tokens: int = MAX_NEW_TOKENS,
    temperature: float = 1.0,
) -> Completions:
    """Sample one completion a prompt, until EOS or `max_new_tokens`.

    Args:
        actor: The policy.
        prompts: Token ids without padding, each int64 `[P]`; lengths may differ.
        generator: Source of randomness; the same state gives the same completions.
        max_new_tokens: Longest completion, EOS included, >= 1.
        temperature: Divides the logits, > 0; log-probabilities are those of the divided ones.

    Raises:
        ConfigError: `temperature` or `max_new_tokens` is out of range.
    """
    if temperature <= 0 or max_new_tokens < 1:
        raise ConfigError(
            f"temperature {temperature} and max_new_tokens {max_new_tokens} must be positive."
        )
    sequences, attention_mask = pad_prompts(prompts)
    newest, past = sequences, actor.no_past()
    running = torch.ones(len(prompts), dtype=torch.bool)
    log_probs, masks = [], []
    for _ in range(max_new_tokens):
        logits = actor.next_token(newest, attention_mask, past) / temperature
        distribution = logits.log_softmax(-1)
        sampled = torch.multinomial(distribution.exp(), 1, generator=generator)
        log_probs.append(distribution.gather(1, sampled).masked_fill(~running[:, None], 0.0))
        masks.append(running[:, None])
        newest = sampled.masked_fill(~running[:, None], PAD)
        sequences = torch.cat([sequences, newest], 1)
        attention_mask = torch.cat([attention_mask, running[:, None].long()], 1)
        running = running & (newest[:, 0] != EOS)
        if not running.any():
            break
    return Completions(sequences, attention_mask, torch.cat(masks, 1), torch.cat(log_probs, 1))


def evaluate(actor: Actor, held_out: Sequence[Tensor]) -> float:
    """Return the share of `held_out` that the actor sorts exactly.

    One completion a prompt, sampled at temperature 1 with a fixed seed: it measures the policy
    that makes the experience, not its mode, and the same weights always score the same.
    """
    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    completions = generate(actor, held_out, generator=generator)
    scores = [reward(prompt, completions.completion(i)) for i, prompt in enumerate(held_out)]
    return sum(scores) / len(scores)
