"""Calls of networks, the outputs that they may return, and errors for other outputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redrb.algorithms import ValueHead, action_logits, action_values, sequence_rewards
from redrb.algorithms.models import evaluating, forward_names
from redrb.errors import ConfigError, RecordError
from tests.networks import VOCABULARY, WIDTH, Answering, PlainActor, Trunk, seeded

TOKENS = torch.tensor([[0, 0, 3, 4, 5], [1, 2, 3, 4, 5]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


class Noting(nn.Module):
    """Takes the arguments of Hugging Face's models, and notes them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, Any] = {}

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: object = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
    ) -> SimpleNamespace:
        self.asked = {
            "past": past_key_values,
            "mask": attention_mask,
            "positions": position_ids,
            "cache": use_cache,
        }
        logits = torch.arange(5.0)[None, :, None].expand(*input_ids.shape, 7)
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


def test_logits_may_come_in_every_form():
    full = torch.arange(5.0)[None, :, None].expand(2, 5, VOCABULARY)
    for answer in (full, {"logits": full}, SimpleNamespace(logits=full), full[:, -3:]):
        logits = action_logits(Answering(answer), TOKENS, MASK, 2)
        assert logits.shape == (2, 2, VOCABULARY)
        assert logits[0, :, 0].tolist() == [2.0, 3.0]  # of positions S - A - 1 and S - A


def test_hugging_faces_arguments_are_passed():
    model = Noting()
    logits = action_logits(model, TOKENS, MASK.bool(), 2)
    assert logits[0, :, 0].tolist() == [2.0, 3.0]
    assert model.asked["past"] is None
    assert model.asked["mask"].tolist() == MASK.tolist()
    assert model.asked["mask"].dtype == torch.int64
    assert model.asked["cache"] is False
    assert model.asked["positions"].tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]


def test_the_module_inside_a_wrapper_decides_the_arguments():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *inputs, **options):
            return self.module(*inputs, **options)

    wrapped = Wrapper(Wrapper(Noting()))
    assert "logits_to_keep" in forward_names(wrapped)
    assert action_logits(wrapped, TOKENS, MASK, 2)[0, :, 0].tolist() == [2.0, 3.0]


def test_a_module_with_the_argument_actions_returns_them_only():
    class OfActions(nn.Module):
        def forward(self, sequences, _mask, actions):
            return torch.zeros(len(sequences), actions, 3)

    assert action_logits(OfActions(), TOKENS, MASK, 2).shape == (2, 2, 3)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 5), [[2.0, 3.0]] * 2),
        ((2, 5, 1), [[2.0, 3.0]] * 2),
        ((2, 2), [[0.0, 1.0]] * 2),
        ((2,), [0.0, 0.0]),
        ((2, 1), [0.0, 0.0]),
    ],
)
def test_values_may_come_in_every_form(shape, expected):
    values = torch.zeros(2) if len(shape) == 1 else torch.arange(shape[1] * 1.0).expand(2, -1)
    values = values.reshape(shape).bfloat16()
    for answer in (values, {"value": values}, SimpleNamespace(logits=values)):
        found = action_values(Answering(answer), TOKENS, MASK, 2)
        assert found.dtype == torch.float32
        assert found.tolist() == expected


def test_rewards_are_one_number_a_sample():
    for answer in (torch.ones(2), torch.ones(2, 1), SimpleNamespace(logits=torch.ones(2, 1))):
        assert sequence_rewards(Answering(answer), TOKENS, MASK).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("call", "answer", "said"),
    [
        (lambda m: action_logits(m, TOKENS, MASK, 2), torch.zeros(2, 5), r"\[2, 5\], not \[B, 5"),
        (lambda m: action_logits(m, TOKENS, MASK, 2), (1, 2), "actor Answering .* tuple"),
        (lambda m: action_values(m, TOKENS, MASK, 2), torch.zeros(2, 4), r"\[2, 4\].*ValueHead"),
        (lambda m: action_values(m, TOKENS, MASK, 2), {"x": 1}, "critic Answering .* dict.* value"),
        (lambda m: sequence_rewards(m, TOKENS, MASK), torch.zeros(2, 5), r"\[2, 5\], not \[2\]"),
        (lambda m: sequence_rewards(m, TOKENS, MASK), 0.5, "reward model Answering .* float"),
    ],
)
def test_unusable_model_outputs_are_refused_by_name(call, answer, said):
    with pytest.raises(RecordError, match=said):
        call(Answering(answer))


def test_a_value_head_makes_a_critic_that_starts_at_0():
    critic = ValueHead(seeded(Trunk), hidden_size=WIDTH)
    assert critic(TOKENS, MASK).shape == TOKENS.shape
    values = action_values(critic, TOKENS, MASK, 2)
    assert values.tolist() == [[0.0, 0.0]] * 2
    values.sum().backward()
    assert critic.head.weight.grad.abs().sum() > 0


def test_a_value_head_names_hidden_states_that_do_not_fit():
    with pytest.raises(ConfigError, match="hidden_size None of the trunk Trunk"):
        ValueHead(Trunk())
    with pytest.raises(RecordError, match=rf"trunk PlainActor .* {VOCABULARY}\], not \[2, 5, 16\]"):
        ValueHead(PlainActor(), hidden_size=WIDTH)(TOKENS, MASK)


def test_modes_come_back_part_by_part():
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model.train()
    model[1].eval()
    with pytest.raises(RuntimeError), evaluating(model, None, print):
        assert not any(part.training for part in model.modules())
        raise RuntimeError
    assert [part.training for part in model.modules()] == [True, True, False]
