"""The sorting task, its networks and the supervised start; `redrb demo` shows that it learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from redrb.algorithms import action_log_probs, generate
from redrb.recipe.examples.sorting import Sorting
from redrb.recipe.examples.sorting.digits import (
    EOS,
    FIRST_DIGIT,
    MAX_NEW_TOKENS,
    MAX_PROMPT_TOKENS,
    PAD,
    held_out_prompts,
    make_prompt,
    reward,
    sample_prompts,
    show,
    target,
)
from redrb.recipe.examples.sorting.policy import Actor, Critic, warm_start
from redrb.recipe.prompts import padded


def digits(*values: int) -> list[int]:
    return [FIRST_DIGIT + value for value in values]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ([*digits(0, 2, 5, 9), EOS], 1.0),
        (digits(0, 2, 5, 9), 0.0),
        ([*digits(0, 2, 5), EOS], 0.0),
        ([*digits(2, 0, 5, 9), EOS], 0.0),
        ([*digits(0, 2, 5, 9), EOS, EOS], 0.0),
        ([], 0.0),
    ],
    ids=["right", "no EOS", "too short", "unsorted", "too long", "empty"],
)
def test_reward_is_exact_match_with_eos(completion, expected):
    prompt = make_prompt([9, 2, 5, 0])
    assert reward(prompt, torch.tensor(completion, dtype=torch.int64)) == expected


def test_target_earns_the_reward():
    for prompt in held_out_prompts():
        assert reward(prompt, target(prompt)) == 1.0
        assert target(prompt).shape[0] < MAX_NEW_TOKENS


def test_prompts_differ_in_length_and_are_never_held_out():
    held_out = {tuple(prompt.tolist()) for prompt in held_out_prompts()}
    prompts = sample_prompts(torch.Generator().manual_seed(0), 2_000)
    assert len(held_out) == 512
    assert {prompt.shape[0] for prompt in prompts} == {6, 7, 8}
    assert max(prompt.shape[0] for prompt in prompts) == MAX_PROMPT_TOKENS
    assert Sorting().max_new_tokens == MAX_NEW_TOKENS
    assert held_out.isdisjoint(tuple(prompt.tolist()) for prompt in prompts)


def test_prompts_follow_the_seed():
    def drawn(seed):
        return [p.tolist() for p in sample_prompts(torch.Generator().manual_seed(seed), 20)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_prompts_are_padded_on_the_left():
    tokens, mask = padded([make_prompt([4, 2]), make_prompt([7])], PAD).values()
    assert tokens.tolist() == [[1, 8, 6, 2], [0, 1, 11, 2]]
    assert mask.tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]


def test_show_is_readable():
    prompt = make_prompt([3, 5, 1])
    assert show(torch.cat([torch.tensor([0]), prompt, target(prompt)])) == "[BOS]351[SEP]135[EOS]"


def networks(seed: int) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {"actor": Actor(), "critic": Critic()}


def test_warm_start_follows_the_seed_and_leaves_the_global_random_state():
    state = torch.get_rng_state()

    def started(seed):
        models = networks(0)
        warm_start(**models, seed=seed, steps=12)
        assert torch.equal(models["critic"].decoder.norm.bias, models["actor"].decoder.norm.bias)
        return models["actor"].state_dict()

    first, same, other = map(started, (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


@pytest.mark.parametrize("seed", [0, 1])
def test_warm_start_leaves_something_to_learn(seed):
    recipe, models = Sorting(seed=seed), networks(seed)
    recipe.initialise(models)
    found = recipe.evaluate(models)
    assert 0.05 < found["reward"] < 0.5


def test_padding_and_the_cache_change_neither_logits_nor_values():
    actor, critic = networks(5).values()
    short, long = make_prompt([3, 1, 2, 0]), make_prompt([9, 8, 7, 6, 5, 4])
    tokens, mask = padded([short, long], PAD).values()
    alone, alone_mask = padded([short], PAD).values()
    for network in (actor, critic):
        row = network(tokens, mask, 4)[0]
        torch.testing.assert_close(row, network(alone, alone_mask, 4)[0], atol=1e-5, rtol=1e-4)
    options = Sorting().generation(torch.Generator().manual_seed(0))
    done = generate(actor, {"input_ids": tokens, "attention_mask": mask}, **options)
    actions = done.action_mask.shape[1]
    logits = actor(done.sequences, done.attention_mask, actions)
    again = action_log_probs(logits, done.sequences, actions) * done.action_mask
    torch.testing.assert_close(done.action_log_probs, again, atol=1e-5, rtol=1e-4)
    first, same = (Sorting().evaluate({"actor": actor}) for _ in range(2))
    assert first == same
