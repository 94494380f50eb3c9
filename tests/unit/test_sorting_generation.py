"""Sampling from the actor, and the padding that it must not notice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from redrb.algorithms import Completions, action_log_probs
from redrb.algorithms import generate as generated
from redrb.errors import ConfigError
from redrb.recipe.prompts import padded
from redrb.recipes.sorting import Sorting
from redrb.recipes.sorting.digits import (
    EOS,
    PAD,
    make_prompt,
    sample_prompts,
)
from redrb.recipes.sorting.policy import Actor, ActorCritic


@pytest.fixture(scope="module")
def model() -> ActorCritic:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return ActorCritic()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def generate(
    actor: Actor, prompts: list[torch.Tensor], *, generator: torch.Generator, **options: Any
) -> Completions:
    """Sample with the options of the recipe."""
    tokens, mask = padded(prompts, PAD).values()
    inputs = {"input_ids": tokens, "attention_mask": mask}
    return generated(actor, inputs, **{**Sorting().generation(generator), **options})


def test_left_padding_does_not_change_logits_or_values(model: ActorCritic) -> None:
    short, long = make_prompt([3, 1, 2, 0]), make_prompt([9, 8, 7, 6, 5, 4])
    tokens, mask = padded([short, long], PAD).values()
    alone, alone_mask = padded([short], PAD).values()
    for network in (model.actor, model.critic):
        row = network(tokens, mask, 4)[0]
        torch.testing.assert_close(row, network(alone, alone_mask, 4)[0], atol=1e-5, rtol=1e-4)


def test_generation_with_left_padding_equals_generation_without(model: ActorCritic) -> None:
    # almost no randomness: a batch and a single prompt draw different random numbers
    prompts = [make_prompt([3, 1, 2, 0]), make_prompt([9, 8, 7, 6, 5, 4])]
    together = generate(model.actor, prompts, generator=seeded(), temperature=1e-4)
    for row, prompt in enumerate(prompts):
        alone = generate(model.actor, [prompt], generator=seeded(), temperature=1e-4)
        assert together.completion(row).tolist() == alone.completion(0).tolist()


def test_masks_say_what_was_sampled(model: ActorCritic) -> None:
    prompts = sample_prompts(seeded(1), 64)
    done = generate(model.actor, prompts, generator=seeded())
    actions = done.action_mask.shape[1]
    start = done.sequences.shape[1] - actions
    lengths = done.action_mask.sum(1)
    assert len(set(lengths.tolist())) > 2
    assert done.sequences.dtype == done.attention_mask.dtype == torch.int64
    assert done.action_mask.dtype == torch.bool
    assert torch.equal(done.attention_mask[:, start:].bool(), done.action_mask)
    assert (done.sequences[:, start:][~done.action_mask] == PAD).all()
    assert (done.action_log_probs[~done.action_mask] == 0).all()
    for row, prompt in enumerate(prompts):
        real = done.attention_mask[row].bool()
        completion = done.completion(row)
        assert done.sequences[row][real].tolist() == [*prompt.tolist(), *completion.tolist()]
        assert EOS not in completion[:-1].tolist()
        assert completion[-1] == EOS or completion.shape[0] == actions


def test_noted_log_probs_are_those_of_one_forward_pass(model: ActorCritic) -> None:
    done = generate(model.actor, sample_prompts(seeded(1), 32), generator=seeded())
    actions = done.action_mask.shape[1]
    logits = model.actor(done.sequences, done.attention_mask, actions)
    again = action_log_probs(logits, done.sequences, actions) * done.action_mask
    torch.testing.assert_close(done.action_log_probs, again, atol=1e-5, rtol=1e-4)


def test_generation_follows_the_seed(model: ActorCritic) -> None:
    prompts = sample_prompts(seeded(1), 8)
    first, same, other = (
        generate(model.actor, prompts, generator=seeded(seed)).sequences for seed in (4, 4, 5)
    )
    assert torch.equal(first, same)
    assert first.shape != other.shape or not torch.equal(first, other)


def test_generation_stops_when_all_have_ended(model: ActorCritic) -> None:
    done = generate(model.actor, [make_prompt([1, 2, 3, 4])], generator=seeded(), max_new_tokens=3)
    assert 1 <= done.action_mask.shape[1] <= 3
    assert done.action_mask.all()


def test_evaluation_is_repeatable(model: ActorCritic) -> None:
    first, same = (Sorting().evaluate({"actor": model.actor}) for _ in range(2))
    assert first == same


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"max_new_tokens": 0}])
def test_a_wrong_option_is_named(model: ActorCritic, wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        generate(model.actor, [make_prompt([1])], generator=seeded(), **wrong)
