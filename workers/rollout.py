"""What a maker does with prompts: sample, score, and fill every field of an Experience."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from redrb.algorithms import GAE, NaiveExperienceMaker
from redrb.experience import Experience
from workers.generation import rewards
from workers.policy import Actor, ActorCritic
from workers.settings import RolloutSettings
from workers.sorting import EOS, MAX_NEW_TOKENS, PAD, pad_prompts


def make_experience(
    actor_critic: ActorCritic,
    reference: Actor,
    prompts: Sequence[Tensor],
    *,
    generator: torch.Generator,
    settings: RolloutSettings | None = None,
    policy_version: int | None = None,
) -> Experience:
    """Sample `group_size` completions of each prompt at temperature 1 and score them.

    Rows `i * group_size` to `(i + 1) * group_size - 1` belong to prompt i. `kl` is the log-ratio
    of behaviour to reference policy at each sampled token, which is the estimator k1. `advantages`
    are not normalised; `advantages + values` are the returns that the critic learns.

    Args:
        actor_critic: Behaviour policy and its critic.
        reference: The policy that `kl` is measured against, usually the warm start's actor.
        prompts: Token ids without padding, each int64 `[P]`.
        generator: Source of randomness of the sampling.
        settings: How experience is made.
        policy_version: Weight version of `actor_critic`, noted on every sample.

    Returns:
        B = `len(prompts) * group_size` samples: prompts end at S - A, padded on the left;
        completions start there, padded on the right with both masks 0.
    """
    settings = settings or RolloutSettings()
    maker = NaiveExperienceMaker(
        actor_critic.actor,
        actor_critic.critic,
        rewards,
        reference,
        settings.kl_coef,
        gae=GAE(gamma=settings.gamma, lam=settings.lam),
    )
    tokens, mask = pad_prompts([prompt for prompt in prompts for _ in range(settings.group_size)])
    return maker.make_experience(
        {"input_ids": tokens, "attention_mask": mask},
        policy_version=policy_version,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        generator=generator,
    )
