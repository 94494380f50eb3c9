"""Log-probabilities and entropies, also where logits are too many to copy."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from redrb.algorithms import action_log_probs, chosen_log_probs, entropy
from redrb.algorithms import log_probs as module
from redrb.errors import RecordError


def close(actual: Tensor, expected: object) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected))


PROBABILITIES = torch.tensor([[[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]]])


def test_logits_of_actions_belong_to_the_last_tokens():
    found = action_log_probs(PROBABILITIES.log(), torch.tensor([[0, 0, 2, 1]]), 2)
    close(found, [[math.log(0.7), math.log(0.3)]])


def test_logits_of_all_positions_are_shifted_by_one():
    # the output after the token before an action chose it; that after the last token chose nothing
    everything = torch.cat([torch.ones(1, 1, 3) / 3, PROBABILITIES, torch.ones(1, 1, 3) / 3], 1)
    found = action_log_probs(everything.log(), torch.tensor([[0, 0, 2, 1]]), 2)
    close(found, [[math.log(0.7), math.log(0.3)]])


def test_temperature_divides_the_logits():
    # logits log 4 and 0 at temperature 2 are log 2 and 0: probabilities 2 / 3 and 1 / 3
    logits = torch.tensor([[[math.log(4), 0.0]]])
    close(chosen_log_probs(logits, torch.tensor([[0]]), temperature=2), [[math.log(2 / 3)]])


@pytest.mark.parametrize("part", [1, 70, 1 << 24])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_parts_give_what_log_softmax_gives(part, temperature, monkeypatch):
    monkeypatch.setattr(module, "PART_ELEMENTS", part)
    generator = torch.Generator().manual_seed(0)
    logits = (9 * torch.randn(5, 7, 11, generator=generator)).requires_grad_()
    tokens = torch.randint(11, (5, 7), generator=generator)
    gradient = torch.randn(5, 7, generator=generator)
    expected = (logits / temperature).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    (by_torch,) = torch.autograd.grad(expected, logits, gradient)
    found = chosen_log_probs(logits, tokens, temperature=temperature)
    (by_parts,) = torch.autograd.grad(found, logits, gradient)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(by_parts, by_torch)
    torch.testing.assert_close(
        entropy(logits), torch.distributions.Categorical(logits=logits).entropy()
    )


def test_gradients_are_exact():
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[0, 4, 2], [1, 1, 3]])
    assert torch.autograd.gradcheck(
        lambda at: chosen_log_probs(at, tokens, temperature=0.9), (logits,)
    )


def test_bfloat16_logits_give_float32_log_probs():
    logits = (4 * torch.randn(2, 3, 50)).bfloat16().requires_grad_()
    tokens = torch.randint(50, (2, 3))
    found = chosen_log_probs(logits, tokens)
    assert found.dtype == torch.float32
    expected = logits.detach().float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(found.detach(), expected)
    found.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_an_excluded_token_does_not_make_entropy_nan():
    logits = torch.tensor([[[0.0, -math.inf, 0.0]]], requires_grad=True)
    close(entropy(logits), [[math.log(2)]])
    (chosen_log_probs(logits, torch.tensor([[0]])).sum() + entropy(logits).sum()).backward()
    assert logits.grad is not None
    close(logits.grad, [[[0.5, 0.0, -0.5]]])


def test_entropy_by_hand():
    logits = torch.log(torch.tensor([[[0.5, 0.5], [0.9, 0.1]]]))
    close(entropy(logits), [[math.log(2), -0.9 * math.log(0.9) - 0.1 * math.log(0.1)]])


def test_other_shapes_are_named():
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    with pytest.raises(RecordError, match=r"\[2, 5, 3\], not \[B, 6, V\].*\[B, 2, V\]"):
        action_log_probs(torch.zeros(2, 5, 3), tokens, 2)
    with pytest.raises(RecordError, match="6 actions in a sequence of 6"):
        action_log_probs(torch.zeros(2, 6, 3), tokens, 6)
