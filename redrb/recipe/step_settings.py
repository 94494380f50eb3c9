"""`StepSettings`: the settings that the training steps of PPO and GRPO share."""

from __future__ import annotations

from typing import Any

from redrb.options import option
from redrb.recipe.settings import RecipeSettings


class StepSettings(RecipeSettings):
    """Settings of the training step."""

    clip: float = option(0.2, "lower clipping range of the ratio", above=0)
    clip_high: float = option(
        0.0, "upper clipping range of the ratio, 0.28 in DAPO; 0: as the lower one", least=0
    )
    aggregation: str = option(
        "token", "how losses of actions become one number", choices=("token", "sequence")
    )
    truncated_importance: float = option(
        0.0,
        "cap of truncated importance sampling, such as 2, which corrects log-probabilities of "
        "makers that differ from the trainer's; 0: off",
        least=0,
    )
    max_grad_norm: float = option(1.0, "largest norm of the gradients of each model", above=0)
    micro_batch_size: int = option(
        0, "most samples in a forward pass of the trainer; 0: the whole batch", least=0
    )
    micro_batch_tokens: int = option(
        0,
        "most tokens in a forward pass of the trainer, padding included; 0: the whole batch",
        least=0,
    )

    @property
    def step_options(self) -> dict[str, Any]:
        """These settings, as `redrb.algorithms.PPOStep` and `GRPOStep` take them."""
        return {
            "clip": self.clip,
            "clip_high": self.clip_high or None,
            "aggregation": self.aggregation,
            "truncated_importance": self.truncated_importance or None,
            "max_grad_norm": self.max_grad_norm,
            "micro_batch_size": self.micro_batch_size or None,
            "micro_batch_tokens": self.micro_batch_tokens or None,
        }
