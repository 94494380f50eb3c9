"""What a maker does with prompts: sample, score, and fill every field of an Experience."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from redrb.experience import Experience
from workers.advantages import gae, token_rewards
from workers.generation import generate
from workers.policy import Actor, ActorCritic, chosen_log_probs
from workers.settings import RolloutSettings
from workers.sorting import reward


@torch.no_grad()
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
    of behaviour to reference policy at each sampled token: the estimator k1 of Schulman 2020,
    "Approximating KL Divergence", unbiased and at times negative. `advantages` are not normalised;
    `advantages + values` are the returns that the critic learns.

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
    repeated = [prompt for prompt in prompts for _ in range(settings.group_size)]
    done = generate(actor_critic.actor, repeated, generator=generator)
    actions = done.action_mask.shape[1]
    scores = torch.tensor([reward(prompt, done.completion(i)) for i, prompt in enumerate(repeated)])
    expected = chosen_log_probs(
        reference(done.sequences, done.attention_mask, actions), done.sequences
    )
    kl = (done.action_log_probs - expected) * done.action_mask
    values = actor_critic.critic(done.sequences, done.attention_mask, actions) * done.action_mask
    rewards = token_rewards(scores, kl, done.action_mask, kl_coef=settings.kl_coef)
    return Experience(
        sequences=done.sequences,
        action_log_probs=done.action_log_probs,
        values=values,
        reward=scores,
        kl=kl,
        advantages=gae(rewards, values, done.action_mask, gamma=settings.gamma, lam=settings.lam),
        attention_mask=done.attention_mask,
        action_mask=done.action_mask,
        policy_version=policy_version,
    )
