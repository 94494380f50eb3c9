"""Makers of experience: prompts in, a batch with every field that a trainer needs out."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from redrb.algorithms.advantages import (
    GAE,
    compute_reward,
    gae,
    group_relative_advantages,
    token_rewards,
)
from redrb.algorithms.batches import REFERENCE_LOG_PROBS
from redrb.algorithms.generation import Completions, generate, read_prompts
from redrb.algorithms.log_probs import action_log_probs
from redrb.algorithms.losses import KLEstimator, check_choice, kl_estimate
from redrb.algorithms.models import action_logits, action_values, evaluating
from redrb.algorithms.scoring import Scorer, scores_of
from redrb.errors import ConfigError, RecordError
from redrb.experience import Experience

RAW_REWARD = "raw_reward"
"""Name in `Experience.tensors` of what the reward model said, before any price, float32 `[B]`."""


class NaiveExperienceMaker:
    """Makes experience for PPO with four networks, as ColossalAI's `coati` does.

    By default `reward` is shaped by the divergence from `initial_model`, `raw - kl_coef * mean kl`,
    `advantages` are `reward - values`, and `tensors["raw_reward"]` keeps the reward before that.
    With `gae`, each action pays its divergence instead: `reward` is raw, and `advantages` are
    GAE's. Either way `kl` is the estimate at each action.

    Networks run in eval mode without gradients, and are put back into their modes afterwards.
    To change a part, subclass it: `sample`, `score` and `value` are its joints.

    Args:
        actor: Behaviour policy; `redrb.algorithms.models` says how networks are called.
        critic: Gives values `[B, A]` (of `[B, S]`), or `[B]`.
        reward_model: Gives `[B]`; or a function of `Completions` that does.
        initial_model: The policy that the divergence is measured from.
        kl_coef: Price of a nat of it, in rewards, >= 0.
        gae: How generalized advantages are estimated; None: `reward - values`.
        kl_estimator: How the divergence is estimated; see `redrb.algorithms.kl_estimate`.

    Raises:
        ConfigError: An option is out of range.
    """

    def __init__(
        self,
        actor: nn.Module,
        critic: nn.Module,
        reward_model: Scorer,
        initial_model: nn.Module,
        kl_coef: float = 0.1,
        *,
        gae: GAE | None = None,
        kl_estimator: KLEstimator = "k1",
    ) -> None:
        if not kl_coef >= 0:
            raise ConfigError(f"kl_coef {kl_coef} must be at least 0.")
        check_choice("kl_estimator", kl_estimator, get_args(KLEstimator))
        self.actor, self.critic, self.reward_model = actor, critic, reward_model
        self.initial_model, self.kl_coef, self.gae = initial_model, kl_coef, gae
        self.kl_estimator: KLEstimator = kl_estimator

    @torch.no_grad()
    def make_experience(
        self, inputs: object, *, policy_version: int | None = None, **generate_kwargs: Any
    ) -> Experience:
        """Sample a completion of each prompt and fill all eight fields.

        Args:
            inputs: Prompts padded on the left, int64 `[B, P]`, or a mapping with `input_ids` and
                `attention_mask`.
            policy_version: Weight version of the actor, noted on every sample; where completions
                come with versions of their tokens, on those whose versions are not all known.
            generate_kwargs: Options of `redrb.algorithms.generate`.

        Returns:
            B samples on the actor's device: prompts end at S - A, padded on the left; completions
            start there, padded on the right with both masks 0. With `before_token` among the
            options, `token_versions` say which weights computed each token, and a sample's
            `policy_version` is the oldest of its own.

        Raises:
            RecordError: The inputs are something else, or a network answers with another shape.
            ConfigError: An option of `generate` is out of range.
        """
        with evaluating(self.actor, self.critic, self.reward_model, self.initial_model):
            done = self.sample(inputs, **generate_kwargs)
            mask = done.action_mask
            temperature = generate_kwargs.get("temperature", 1.0)
            expected = reference_log_probs(self.initial_model, done, temperature=temperature)
            raw = self.score(done)
            values = self.value(done)
        kl = kl_estimate(done.action_log_probs, expected, mask, estimator=self.kl_estimator)
        reward, advantages = self._judge(raw, values, kl, mask)
        return Experience(
            sequences=done.sequences,
            action_log_probs=done.action_log_probs,
            values=values,
            reward=reward,
            kl=kl,
            advantages=advantages,
            attention_mask=done.attention_mask,
            action_mask=mask,
            tensors={} if self.gae else {RAW_REWARD: raw},
            policy_version=done.policy_version(policy_version),
            token_versions=done.token_versions,
        )

    def sample(self, inputs: object, **generate_kwargs: Any) -> Completions:
        """Return a completion of each prompt; another engine of inference overrides this."""
        return generate(self.actor, inputs, **generate_kwargs)

    def score(self, completions: Completions) -> Tensor:
        """Return the raw reward of each completion, float32 `[B]`."""
        return scores_of(self.reward_model, completions)

    def value(self, completions: Completions) -> Tensor:
        """Return the critic's values, float32 `[B]`, or `[B, A]` with 0 on padding."""
        mask = completions.action_mask
        values = action_values(
            self.critic, completions.sequences, completions.attention_mask, mask.shape[1]
        )
        return values if values.dim() == 1 else values.masked_fill(~mask, 0.0)

    def _judge(
        self, raw: Tensor, values: Tensor, kl: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return `reward` `[B]` and `advantages` in the shape of the values."""
        if self.gae is not None:
            if values.dim() == 1:
                raise RecordError(
                    "GAE needs a value at each action, and the critic gives one a sample: let it "
                    "answer [B, S], or leave gae out.",
                    field="values",
                )
            rewards = token_rewards(raw, kl, mask, kl_coef=self.kl_coef)
            return raw, gae(rewards, values, mask, gamma=self.gae.gamma, lam=self.gae.lam)
        reward = compute_reward(raw, kl, mask, kl_coef=self.kl_coef)
        if values.dim() == 1:
            return reward, reward - values
        return reward, (reward[:, None] - values).masked_fill(~mask, 0.0)


class GRPOExperienceMaker:
    """Makes groups of completions and compares each with its group; there is no critic.

    `advantages` `[B]` are group-relative, `reward` is raw, `values` is None. With an
    `initial_model`, `kl` is its estimate k3 and `tensors["reference_log_probs"]` what GRPO's own
    divergence is taken from; without, `kl` is None.

    Networks run in eval mode without gradients, and are put back into their modes afterwards.
    To change a part, subclass it: `sample` and `score` are its joints.

    Args:
        actor: Behaviour policy; `redrb.algorithms.models` says how networks are called.
        reward_model: Gives `[B]`; or a function of `Completions` that does.
        initial_model: The reference policy.
        group_size: Completions of each prompt, >= 1 (with one, all advantages are 0).
        scale_by_std: False leaves out the division by the group's standard deviation (Dr. GRPO).

    Raises:
        ConfigError: An option is out of range.
    """

    def __init__(
        self,
        actor: nn.Module,
        reward_model: Scorer,
        initial_model: nn.Module | None = None,
        group_size: int = 8,
        *,
        scale_by_std: bool = True,
    ) -> None:
        if group_size < 1:
            raise ConfigError(f"group_size {group_size} must be at least 1.")
        self.actor, self.reward_model, self.initial_model = actor, reward_model, initial_model
        self.group_size, self.scale_by_std = group_size, scale_by_std

    @torch.no_grad()
    def make_experience(
        self,
        inputs: object,
        *,
        policy_version: int | None = None,
        group_ids: Sequence[str] | None = None,
        **generate_kwargs: Any,
    ) -> Experience:
        """Sample `group_size` completions of each prompt and compare them.

        Args:
            inputs: P prompts padded on the left, int64 `[P, T]`, or a mapping with `input_ids` and
                `attention_mask`.
            policy_version: Weight version of the actor, noted on every sample; where completions
                come with versions of their tokens, on those whose versions are not all known.
            group_ids: Names of the P groups; None: names that no other group has.
            generate_kwargs: Options of `redrb.algorithms.generate`.

        Returns:
            `P * group_size` samples on the actor's device; rows `i * group_size` to
            `(i + 1) * group_size - 1` belong to prompt i. With `before_token` among the options,
            `token_versions` and `policy_version` are as `NaiveExperienceMaker` notes them.

        Raises:
            RecordError: The inputs are something else, or a network answers with another shape.
            ConfigError: An option of `generate` is out of range.
        """
        size = self.group_size
        tokens, mask = read_prompts(inputs, pad_token_id=generate_kwargs.get("pad_token_id"))
        names = [uuid.uuid4().hex for _ in tokens] if group_ids is None else list(group_ids)
        if len(names) != len(tokens):
            raise RecordError(
                f"{len(names)} group_ids came for {len(tokens)} prompts.", field="group_id"
            )
        repeated = {
            "input_ids": tokens.repeat_interleave(size, 0),
            "attention_mask": mask.repeat_interleave(size, 0),
        }
        with evaluating(self.actor, self.reward_model, self.initial_model):
            done = self.sample(repeated, **generate_kwargs)
            reward = self.score(done)
            kl, tensors = self._compare(done, generate_kwargs.get("temperature", 1.0))
        return Experience(
            sequences=done.sequences,
            action_log_probs=done.action_log_probs,
            values=None,
            reward=reward,
            kl=kl,
            advantages=group_relative_advantages(
                reward, group_size=size, scale_by_std=self.scale_by_std
            ),
            attention_mask=done.attention_mask,
            action_mask=done.action_mask,
            tensors=tensors,
            policy_version=done.policy_version(policy_version),
            token_versions=done.token_versions,
            group_id=[name for name in names for _ in range(size)],
        )

    def sample(self, inputs: object, **generate_kwargs: Any) -> Completions:
        """Return a completion of each prompt; another engine of inference overrides this."""
        return generate(self.actor, inputs, **generate_kwargs)

    def score(self, completions: Completions) -> Tensor:
        """Return the raw reward of each completion, float32 `[B]`."""
        return scores_of(self.reward_model, completions)

    def _compare(
        self, done: Completions, temperature: float
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return `kl` and `tensors`, None and empty without a reference."""
        if self.initial_model is None:
            return None, {}
        expected = reference_log_probs(self.initial_model, done, temperature=temperature)
        kl = kl_estimate(done.action_log_probs, expected, done.action_mask)
        return kl, {REFERENCE_LOG_PROBS: expected}


@torch.no_grad()
def reference_log_probs(model: nn.Module, done: Completions, *, temperature: float) -> Tensor:
    """Return a policy's log-probability of each action, float32 `[B, A]`, 0 on padding."""
    actions = done.action_mask.shape[1]
    logits = action_logits(model, done.sequences, done.attention_mask, actions)
    log_probs = action_log_probs(logits, done.sequences, actions, temperature=temperature)
    return log_probs.to(done.sequences.device).masked_fill(~done.action_mask, 0.0)
