"""What a maker does with prompts: sample, score, and fill every field of an Experience."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from redrb.algorithms import GAE, NaiveExperienceMaker, read_prompts
from redrb.experience import Experience
from workers.settings import RolloutSettings
from workers.sorting.generation import rewards
from workers.sorting.policy import Actor, Critic
from workers.sorting.task import EOS, MAX_NEW_TOKENS, PAD, pad_prompts, show

GENERATION: dict[str, Any] = {
    "max_new_tokens": MAX_NEW_TOKENS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
"""How completions are sampled: at temperature 1, until EOS."""


class SortingMaker(NaiveExperienceMaker):
    """Samples completions of prompts and scores them exactly; names the group of each.

    `kl` is the log-ratio of behaviour to reference policy at each sampled token, which is the
    estimator k1. `advantages` are GAE's and not normalised; `advantages + values` are the returns
    that the critic learns.

    Args:
        actor: Behaviour policy.
        critic: Its critic.
        reference: The policy that `kl` is measured against, usually the warm start's actor.
        settings: How experience is made.
        name: Whose groups they are: part of their names, and a tag.
    """

    def __init__(
        self,
        actor: Actor,
        critic: Critic,
        reference: Actor,
        settings: RolloutSettings | None = None,
        *,
        name: str = "maker",
    ) -> None:
        settings = settings or RolloutSettings()
        super().__init__(
            actor,
            critic,
            rewards,
            reference,
            settings.kl_coef,
            gae=GAE(gamma=settings.gamma, lam=settings.lam),
        )
        self._name = name
        self._group_size = settings.group_size
        self._steps = 0

    def count_groups(self, inputs: object) -> int:
        """Return the number of prompts in a batch of `prompt_batch`."""
        tokens, _ = read_prompts(inputs, pad_token_id=PAD)
        return len(tokens) // self._group_size

    def make_experience(
        self, inputs: object, *, policy_version: int | None = None, **generate_kwargs: Any
    ) -> Experience:
        """Return the experience for a batch of `prompt_batch`.

        Rows `i * group_size` to `(i + 1) * group_size - 1` belong to prompt i. Prompts end at
        S - A, padded on the left; completions start there, padded on the right with both masks 0.
        """
        experience = super().make_experience(
            inputs, policy_version=policy_version, **generate_kwargs
        )
        self._steps += 1
        tokens, mask = read_prompts(inputs, pad_token_id=PAD)
        prompts = [row[counts.bool()] for row, counts in zip(tokens, mask, strict=True)]
        experience.group_id = [
            f"{self._name}-{self._steps}-{row // self._group_size}" for row in range(len(prompts))
        ]
        experience.tags = [{"digits": len(prompt) - 2, "maker": self._name} for prompt in prompts]
        experience.extras = [{"prompt": show(prompt)} for prompt in prompts]
        return experience


def prompt_batch(prompts: Sequence[Tensor], group_size: int) -> dict[str, Tensor]:
    """Return each prompt `group_size` times, as a maker wants a batch.

    Args:
        prompts: Token ids without padding, each int64 `[P]`.
        group_size: Completions of each prompt.

    Returns:
        `input_ids` and `attention_mask`, int64 `[len(prompts) * group_size, longest P]`.
    """
    tokens, mask = pad_prompts([prompt for prompt in prompts for _ in range(group_size)])
    return {"input_ids": tokens, "attention_mask": mask}
