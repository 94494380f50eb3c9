"""Sampling: `top_k` and `top_p`, the end of completions, and padding without effect."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from redrb.algorithms import Completions, action_log_probs, action_logits, generate
from redrb.algorithms.generation import Sampler, SamplingEnded
from redrb.errors import ConfigError, RecordError
from tests.networks import VOCABULARY, PlainActor, seeded

EOS = 3
PROMPTS = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
HOLE = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
LEFT = {"input_ids": PROMPTS, "attention_mask": MASK}


@pytest.fixture(scope="module")
def actor():
    return seeded(PlainActor)


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def many(actor: nn.Module, rows: int = 64, **options: Any) -> Completions:
    prompts = torch.randint(4, VOCABULARY, (rows, 3), generator=random(9))
    given = {"max_new_tokens": 6, "eos_token_id": EOS, "generator": random(), **options}
    return generate(actor, prompts, **given)


def test_masks_mark_the_sampled_tokens(actor):
    done = many(actor, pad_token_id=11)
    actions = done.action_mask.shape[1]
    start = done.sequences.shape[1] - actions
    assert len(done) == 64
    assert len(set(done.action_mask.sum(1).tolist())) > 2
    assert done.sequences.dtype == done.attention_mask.dtype == torch.int64
    assert done.action_mask.dtype == torch.bool
    assert done.action_log_probs.dtype == torch.float32
    assert torch.equal(done.attention_mask[:, start:].bool(), done.action_mask)
    assert (done.sequences[:, start:][~done.action_mask] == 11).all()
    assert (done.action_log_probs[~done.action_mask] == 0).all()
    for row in range(64):
        completion = done.completion(row).tolist()
        assert EOS not in completion[:-1]
        assert completion[-1] == EOS or len(completion) == actions
        together = [*done.prompt(row).tolist(), *completion]
        assert done.sequences[row][done.attention_mask[row].bool()].tolist() == together


def test_any_of_several_eos_ends(actor):
    done = many(actor, eos_token_id=[3, 4, 5])
    ends = [done.completion(row)[-1].item() for row in range(64)]
    assert {3, 4, 5} <= set(ends)
    inner = torch.cat([done.completion(row)[:-1] for row in range(64)])
    assert not torch.isin(inner, torch.tensor([3, 4, 5])).any()


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ({"max_length": 7}, 4),
        ({"max_length": 7, "max_new_tokens": 2}, 2),
        ({"max_length": 5, "max_new_tokens": 9}, 2),
    ],
)
def test_the_shorter_length_counts(actor, lengths, expected):
    done = many(actor, **{"max_new_tokens": None, "eos_token_id": None, **lengths})
    assert done.action_mask.shape[1] == expected


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_noted_log_probs_are_those_of_one_forward_pass(actor, temperature):
    done = many(actor, temperature=temperature, top_k=4, top_p=0.8)
    actions = done.action_mask.shape[1]
    logits = action_logits(actor, done.sequences, done.attention_mask, actions)
    again = action_log_probs(logits, done.sequences, actions, temperature=temperature)
    torch.testing.assert_close(done.action_log_probs, again.detach() * done.action_mask)


def test_generation_follows_the_seed(actor):
    first, same, other = (many(actor, generator=random(seed)).sequences for seed in (4, 4, 5))
    assert torch.equal(first, same)
    assert first.shape != other.shape or not torch.equal(first, other)


def test_without_sampling_the_likeliest_tokens_are_taken(actor):
    greedy = many(actor, do_sample=False)
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}):
        assert torch.equal(many(actor, **options).sequences, greedy.sequences)


def test_left_padding_equals_no_padding(actor):
    together = generate(actor, LEFT, max_new_tokens=5, do_sample=False, eos_token_id=EOS)
    for row, prompt in enumerate((PROMPTS[:1, 2:], PROMPTS[1:])):
        alone = generate(actor, prompt, max_new_tokens=5, do_sample=False, eos_token_id=EOS)
        assert together.completion(row).tolist() == alone.completion(0).tolist()
        of_row = together.action_log_probs[row][together.action_mask[row]]
        torch.testing.assert_close(of_row, alone.action_log_probs[0])


def test_a_prompts_leading_pad_tokens_are_padding(actor):
    prompts = torch.tensor([[0, 0, 5, 0, 6], [7, 8, 9, 0, 10]])
    done = generate(actor, prompts, max_new_tokens=1, pad_token_id=0)
    assert done.attention_mask[:, :5].tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert done.prompt(0).tolist() == [5, 0, 6]
    assert generate(actor, prompts, max_new_tokens=1).attention_mask.all()


def test_padding_on_the_right_moves_to_the_left(actor):
    tokens = torch.tensor([[5, 6, 0, 0], [7, 8, 9, 10]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    encoded = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": 0 * tokens}
    left = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    expected = generate(actor, left, max_new_tokens=3, pad_token_id=0, do_sample=False)
    for prompts in (encoded, tokens):
        done = generate(actor, prompts, max_new_tokens=3, pad_token_id=0, do_sample=False)
        assert torch.equal(done.sequences, expected.sequences)
        assert torch.equal(done.attention_mask, expected.attention_mask)


def test_a_module_with_a_cache_is_used_without_it():
    class Counting(nn.Module):
        """Says that the token after the newest is the next higher one."""

        def forward(self, sequences, _attention_mask, cache=None, use_cache=0):
            assert not use_cache
            return 99.0 * nn.functional.one_hot(sequences + 1, 20).float()

    options = {"max_new_tokens": 3, "use_cache": False, "early_stopping": True}
    done = generate(Counting(), torch.tensor([[4, 5]]), **options)
    assert done.completion(0).tolist() == [6, 7, 8]


def test_the_cache_of_transformers_is_passed_on_under_both_of_its_names():
    def counted(name, newest, mask, seen):
        """Says that the token after the newest is the next higher one."""
        assert newest.shape[1] == (1 if seen else 2)
        now = [*seen, *newest[0].tolist()]
        assert len(now) == mask.shape[1]
        logits = 99.0 * nn.functional.one_hot(newest + 1, 20).float()
        return SimpleNamespace(logits=logits, **{name: now})

    class New(nn.Module):
        def forward(self, input_ids, attention_mask, use_cache, cache=()):
            return counted("cache", input_ids, attention_mask, cache)

    class Old(nn.Module):
        def forward(self, input_ids, attention_mask, use_cache, past_key_values=()):
            return counted("past_key_values", input_ids, attention_mask, past_key_values)

    for model in (New(), Old()):
        done = generate(model, torch.tensor([[4, 5]]), max_new_tokens=3)
        assert done.completion(0).tolist() == [6, 7, 8]


# probabilities 0.5, 0.3, 0.15, 0.05 of tokens 2, 0, 3, 1
LOGITS = torch.tensor([[0.3, 0.05, 0.5, 0.15]]).log()


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 2}),
        ({"top_k": 0}, {0, 1, 2, 3}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        # 0.5 does not reach 0.7 and 0.5 + 0.3 does
        ({"top_p": 0.7}, {0, 2}),
        ({"top_p": 0.45}, {2}),
        ({"top_p": 0.9}, {0, 2, 3}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        # of 0.5 and 0.3, renormalised to 0.625 and 0.375, the first alone reaches 0.6
        ({"top_k": 2, "top_p": 0.6}, {2}),
        ({"do_sample": False}, {2}),
    ],
)
def test_only_these_tokens_are_sampled(options, allowed):
    sampler = Sampler(generator=random(), **options)
    tokens, log_probs = sampler.choose(LOGITS.expand(2_000, 4))
    assert set(tokens.tolist()) == allowed
    torch.testing.assert_close(log_probs, LOGITS[0][tokens])


def test_frequencies_follow_the_temperature():
    # at temperature 0.5 probabilities are squared: 0.25, 0.09, 0.0225, 0.0025 of 0.365
    tokens, log_probs = Sampler(temperature=0.5, generator=random()).choose(
        LOGITS.expand(20_000, 4)
    )
    share = (tokens == 2).float().mean().item()
    assert share == pytest.approx(0.25 / 0.365, abs=0.01)
    assert log_probs[tokens == 2][0].item() == pytest.approx(math.log(0.25 / 0.365))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"top_k": -1}, "top_k -1"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"num_beams": 2}, "num_beams 2"),
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
        ({"max_new_tokens": None, "max_length": 4}, "max_length 4 more than the 4 tokens"),
        ({"max_new_tokens": None}, "max_new_tokens or max_length"),
    ],
)
def test_a_wrong_option_is_named(actor, options, said):
    with pytest.raises(ConfigError, match=said):
        generate(actor, PROMPTS, **{"max_new_tokens": 3, **options})


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([[1, 2]], "prompts came as a list"),
        ("text", "prompts came as a str"),
        ({"input_ids": [[1, 2]]}, "input_ids came as a list"),
        ({"attention_mask": MASK}, "mapping with attention_mask"),
        ({**LEFT, "answer": ["4"]}, "key 'answer' of 2 prompts is a list of 1"),
        ({**LEFT, "answer": "4"}, "key 'answer' of 2 prompts is a str"),
        ({**LEFT, "level": torch.ones(3)}, r"key 'level' of 2 prompts is a Tensor of shape \[3\]"),
        ({}, "mapping with nothing"),
        (torch.tensor([1, 2]), r"torch.int64 of shape \[2\]"),
        (torch.ones(2, 2), r"torch.float32 of shape \[2, 2\]"),
        (torch.zeros(0, 2, dtype=torch.int64), r"\[0, 2\]"),
        ({"input_ids": PROMPTS, "attention_mask": MASK[:1]}, r"attention_mask has shape \[1, 4\]"),
        ({"input_ids": PROMPTS, "attention_mask": HOLE}, "not between them"),
        ({"input_ids": PROMPTS, "attention_mask": 0 * MASK}, "at least one token each"),
    ],
)
def test_unusable_prompts_are_refused_by_name(actor, prompts, said):
    with pytest.raises(RecordError, match=said):
        generate(actor, prompts, max_new_tokens=1)


def test_other_logits_are_named():
    class Wrong(nn.Module):
        def forward(self, sequences, _attention_mask):
            return torch.zeros(sequences.shape)

    with pytest.raises(RecordError, match=r"actor Wrong .* \[2, 4\], not \[2, S, V\]"):
        generate(Wrong(), PROMPTS, max_new_tokens=1)


def test_sampling_that_ends_at_once_gives_completions_without_a_token(actor):
    def ended():
        raise SamplingEnded

    done = generate(actor, PROMPTS, max_new_tokens=3, before_token=ended)
    assert [done.completion(row).tolist() for row in range(2)] == [[], []]
    assert done.sequences.tolist() == PROMPTS.tolist()
