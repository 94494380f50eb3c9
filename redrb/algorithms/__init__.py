"""PPO and GRPO for trainers and makers: training steps, losses, advantages, experience makers.

Pure torch, for any `nn.Module` and for causal models of Hugging Face, without importing
transformers. `redrb.algorithms.models` says how networks are called.
"""

from redrb.algorithms.advantages import (
    GAE,
    compute_reward,
    gae,
    group_relative_advantages,
    token_rewards,
)
from redrb.algorithms.aggregation import Aggregation, Totals
from redrb.algorithms.batches import TrainingBatch
from redrb.algorithms.completion import Completion
from redrb.algorithms.completions import Completions
from redrb.algorithms.experience_makers import GRPOExperienceMaker, NaiveExperienceMaker
from redrb.algorithms.generation import generate
from redrb.algorithms.gradients import Gradients
from redrb.algorithms.grpo import GRPOStep
from redrb.algorithms.log_probs import action_log_probs, chosen_log_probs, entropy
from redrb.algorithms.losses import (
    KLEstimator,
    action_ratio,
    grpo_loss,
    kl_estimate,
    policy_loss,
    truncated_importance,
    value_loss,
)
from redrb.algorithms.models import action_logits, action_values, sequence_rewards
from redrb.algorithms.ppo import PPOStep, ValueTarget
from redrb.algorithms.prompts import read_prompts
from redrb.algorithms.reward import Reward
from redrb.algorithms.sampling import Sampler
from redrb.algorithms.scoring import RewardFunction, Scorer
from redrb.algorithms.value_head import ValueHead

__all__ = [
    "GAE",
    "Aggregation",
    "Completion",
    "Completions",
    "GRPOExperienceMaker",
    "GRPOStep",
    "Gradients",
    "KLEstimator",
    "NaiveExperienceMaker",
    "PPOStep",
    "Reward",
    "RewardFunction",
    "Sampler",
    "Scorer",
    "Totals",
    "TrainingBatch",
    "ValueHead",
    "ValueTarget",
    "action_log_probs",
    "action_logits",
    "action_ratio",
    "action_values",
    "chosen_log_probs",
    "compute_reward",
    "entropy",
    "gae",
    "generate",
    "group_relative_advantages",
    "grpo_loss",
    "kl_estimate",
    "policy_loss",
    "read_prompts",
    "sequence_rewards",
    "token_rewards",
    "truncated_importance",
    "value_loss",
]
