"""GRPO's losses against those that TRL's `GRPOTrainer` computes."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from redrb.algorithms import grpo_loss, truncated_importance

ROWS, ACTIONS = 4, 7


@pytest.fixture(scope="module")
def trainer():
    return pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def policies() -> dict[str, Tensor]:
    """Log-probabilities of four policies that differ enough to be clipped."""
    made = {"maker": -draw(ROWS, ACTIONS, seed=0).abs() - 0.5}
    for seed, name in enumerate(("proximal", "actor", "reference"), 1):
        made[name] = made["maker"] + 0.4 * draw(ROWS, ACTIONS, seed=seed)
    return made


MASK = torch.arange(ACTIONS) < torch.tensor([7, 3, 1, 5])[:, None]
ADVANTAGES = draw(ROWS, seed=9)


def loss_of_trl(trainer: Any, loss_type: str, old: Tensor, **settings: Any) -> Tensor:
    """Let TRL compute its loss from given log-probabilities."""
    found = policies()
    weights = settings.pop("weights", None)
    args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    given = {
        "args": args,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": weights is not None,
        "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": 1,
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(
            num_processes=1, gather=lambda tensor: tensor, reduce=lambda tensor, **_: tensor
        ),
        "_entropy_bonus_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (
            found["actor"],
            torch.zeros(ROWS, ACTIONS),
            None,
        ),
        "loss_type": loss_type,
        **settings,
    }
    inputs = {
        "prompt_ids": torch.ones(ROWS, 2, dtype=torch.int64),
        "prompt_mask": torch.ones(ROWS, 2, dtype=torch.int64),
        "completion_ids": torch.ones(ROWS, ACTIONS, dtype=torch.int64),
        "completion_mask": MASK.long(),
        "advantages": ADVANTAGES,
        "old_per_token_logps": old,
        "ref_per_token_logps": found["reference"],
        "num_items_in_batch": MASK.sum(),
        "importance_sampling_ratio": weights,
    }
    loss: Tensor = trainer._compute_loss(SimpleNamespace(**given), None, inputs)
    return loss


@pytest.mark.parametrize(
    ("loss_type", "aggregation"), [("grpo", "sequence"), ("dapo", "token"), ("bnpo", "token")]
)
@pytest.mark.parametrize("high", [0.2, 0.28])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("cap", [None, 1.1])
def test_the_loss_is_trls(trainer, loss_type, aggregation, high, beta, cap):
    found = policies()
    weights = None
    old = found["maker"]
    if cap is not None:  # the ratio to the proximal policy, and truncated weights to the maker's
        old = found["proximal"]
        weights = truncated_importance(old, found["maker"], MASK, cap=cap)
        difference = (old - found["maker"]) * MASK
        torch.testing.assert_close(weights, difference.exp().clamp(max=cap))  # as TRL has it
        assert 0 < int((weights[MASK] == cap).sum()) < int(MASK.sum())
    ours = grpo_loss(
        found["actor"],
        old,
        ADVANTAGES[:, None].expand(ROWS, ACTIONS),
        MASK,
        clip=0.2,
        clip_high=high,
        beta=beta,
        reference_log_probs=found["reference"],
        aggregation=aggregation,
        policy_weights=weights,
    )
    theirs = loss_of_trl(trainer, loss_type, old, epsilon_high=high, beta=beta, weights=weights)
    torch.testing.assert_close(ours, theirs)


def test_dr_grpos_loss_is_the_token_mean_times_a_factor(trainer):
    """Its divisor is constant, samples times the longest completion: no loss of redrb."""
    found = policies()
    ours = grpo_loss(
        found["actor"], found["maker"], ADVANTAGES[:, None].expand(ROWS, ACTIONS), MASK, clip=0.2
    )
    theirs = loss_of_trl(trainer, "dr_grpo", found["maker"], max_completion_length=ACTIONS)
    factor = int(MASK.sum()) / (ROWS * ACTIONS)
    assert theirs.item() == pytest.approx(ours.item() * factor)
    assert math.isfinite(theirs.item())
