"""Sampling the demo's task: batches of prompts without padding, and a score on held-out ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from redrb import algorithms
from redrb.algorithms import Completions
from workers.sorting.policy import Actor
from workers.sorting.task import EOS, MAX_NEW_TOKENS, PAD, pad_prompts, reward

EVALUATION_SEED = 7


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
    tokens, mask = pad_prompts(prompts)
    return algorithms.generate(
        actor,
        {"input_ids": tokens, "attention_mask": mask},
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        eos_token_id=EOS,
        pad_token_id=PAD,
        generator=generator,
    )


def evaluate(actor: Actor, held_out: Sequence[Tensor]) -> float:
    """Return the share of `held_out` that the actor sorts exactly.

    One completion a prompt, sampled at temperature 1 with a fixed seed: it measures the policy
    that makes the experience, not its mode, and the same weights always score the same.
    """
    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    return sum(rewards(generate(actor, held_out, generator=generator))) / len(held_out)


def rewards(completions: Completions) -> list[float]:
    """Return the reward of each completion."""
    rows = range(len(completions))
    return [reward(completions.prompt(row), completions.completion(row)) for row in rows]
