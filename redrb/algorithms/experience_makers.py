"""Experience makers: they turn prompts into batches with every field that a trainer needs."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
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
from redrb.algorithms.aggregation import check_choice
from redrb.algorithms.batches import REFERENCE_LOG_PROBS
from redrb.algorithms.completion_scorer import CompletionScorer
from redrb.algorithms.completions import Completions
from redrb.algorithms.log_probs import action_log_probs
from redrb.algorithms.losses import KLEstimator, kl_estimate
from redrb.algorithms.models import action_logits, action_values, evaluating
from redrb.algorithms.optimizer_step import check_not_negative
from redrb.algorithms.prompts import chosen, further_keys, read_prompts, repeated
from redrb.algorithms.scoring import Scorer
from redrb.errors import ConfigError, RecordError
from redrb.experience import Experience
from redrb.experience.records import named_tensors

RAW_REWARD = "raw_reward"
"""Key in `Experience.tensors` of the reward model's score, before any price, float32 `[B]`."""


class NaiveExperienceMaker(CompletionScorer):
    """Makes experience for PPO with four networks, as ColossalAI's `coati` does.

    By default the divergence from `initial_model` lowers `reward` to `raw - kl_coef * mean kl`,
    `advantages` are `reward - values`, and `tensors["raw_reward"]` keeps the raw reward. With
    `gae`, each action pays for its divergence instead: `reward` is raw, and `advantages` are those
    of GAE. In both cases `kl` is the estimate at each action.

    Networks run in eval mode without gradients and get their old modes back. Subclasses override
    `sample`, `score` and `value`.

    Args:
        actor: Behaviour policy; `redrb.algorithms.models` says how networks are called.
        critic: Returns values `[B, A]` (of `[B, S]`), or `[B]`.
        reward_model: A reward model, a `Reward`, or a function of `Completions` that returns `[B]`.
        initial_model: Policy from which the divergence is measured.
        kl_coef: Price of the divergence, in rewards a nat, >= 0.
        gae: Settings of generalized advantage estimation; None: `reward - values`.
        kl_estimator: Estimator of the divergence; see `redrb.algorithms.kl_estimate`.

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
        check_not_negative(kl_coef=kl_coef)
        check_choice("kl_estimator", kl_estimator, get_args(KLEstimator))
        self.actor, self.critic, self.reward_model = actor, critic, reward_model
        self.initial_model, self.kl_coef, self.gae = initial_model, kl_coef, gae
        self.kl_estimator: KLEstimator = kl_estimator

    def make_experience(
        self,
        inputs: object,
        *,
        policy_version: int | None = None,
        extras: Sequence[str] = (),
        tags: Sequence[str] = (),
        **generate_kwargs: Any,
    ) -> Experience:
        """Sample a completion of each prompt and fill all eight fields.

        Args:
            inputs: Prompts, as for `redrb.algorithms.generate`.
            policy_version: Weight version of the actor, for samples without known token versions.
            extras: Further keys of the prompts that become extras of the samples.
            tags: Further keys of the prompts that become tags of the samples.
            generate_kwargs: Options of `redrb.algorithms.generate`.

        Returns:
            B samples on the actor's device. Completions start at S - A; prompts are padded on the
            left, completions on the right. With the option `before_token`, `token_versions` note
            the weights of each token, and `policy_version` is the oldest version of a sample.

        Raises:
            RecordError: The inputs are malformed, or a network answers with another shape.
            ConfigError: An option of `generate` is out of range.
        """
        done, experience = self._sampled(
            inputs, policy_version=policy_version, extras=extras, tags=tags, **generate_kwargs
        )
        with torch.no_grad(), evaluating(self.reward_model):
            return self._rewarded(experience, self.score(done))

    @property
    def makes_parts(self) -> bool:
        """Whether `make_parts` gives some groups of a batch before the others."""
        return self._rewards_in_parts(NaiveExperienceMaker)

    @torch.no_grad()
    def _sampled(
        self,
        inputs: object,
        *,
        policy_version: int | None = None,
        extras: Sequence[str] = (),
        tags: Sequence[str] = (),
        **generate_kwargs: Any,
    ) -> tuple[Completions, Experience]:
        """Return completions of prompts, and their experience without rewards and advantages."""
        keys = further_keys(inputs)
        with evaluating(self.actor, self.critic, self.initial_model):
            done = replace(self.sample(inputs, **generate_kwargs), keys=keys)
            done = self._with_inputs(done, inputs, generate_kwargs)
            mask = done.action_mask
            temperature = generate_kwargs.get("temperature", 1.0)
            reference = reference_log_probs(self.initial_model, done, temperature=temperature)
            values = self.value(done)
        return done, Experience(
            sequences=done.sequences,
            action_log_probs=done.action_log_probs,
            values=values,
            reward=None,
            kl=kl_estimate(done.action_log_probs, reference, mask, estimator=self.kl_estimator),
            advantages=None,
            attention_mask=done.attention_mask,
            action_mask=mask,
            tensors=done.input_tensors(),
            policy_version=done.policy_version(policy_version),
            token_versions=done.token_versions,
            extras=chosen(keys, extras, len(done)),
            tags=chosen(keys, tags, len(done)),
        )

    def _rewarded(self, experience: Experience, raw: Tensor) -> Experience:
        """Return the experience with rewards and advantages."""
        fields = named_tensors(experience)
        values, kl, mask = (fields[name] for name in ("values", "kl", "action_mask"))
        reward, advantages = self._reward_and_advantages(raw, values, kl, mask)
        tensors = experience.tensors | ({} if self.gae else {RAW_REWARD: raw})
        return replace(experience, reward=reward, advantages=advantages, tensors=tensors)

    def value(self, completions: Completions) -> Tensor:
        """Return the critic's values, float32 `[B]`, or `[B, A]` with 0 on padding."""
        mask = completions.action_mask
        values = action_values(
            self.critic,
            completions.sequences,
            completions.attention_mask,
            mask.shape[1],
            inputs=completions.inputs,
        )
        return values if values.dim() == 1 else values.masked_fill(~mask, 0.0)

    def _reward_and_advantages(
        self, raw: Tensor, values: Tensor, kl: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return `reward` `[B]`, and `advantages` in the shape of the values."""
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


class GRPOExperienceMaker(CompletionScorer):
    """Makes groups of completions and compares each with its group, without a critic.

    `advantages` `[B]` are relative to the group, `reward` is raw, and `values` is None. With an
    `initial_model`, `kl` is the estimate k3, and `tensors["reference_log_probs"]` holds the
    log-probabilities from which GRPO's loss takes its divergence; otherwise `kl` is None.

    Networks run in eval mode without gradients and get their old modes back. Subclasses override
    `sample` and `score`.

    Args:
        actor: Behaviour policy; `redrb.algorithms.models` says how networks are called.
        reward_model: A reward model, a `Reward`, or a function of `Completions` that returns `[B]`.
        initial_model: The reference policy.
        group_size: Completions of each prompt, >= 1; with one, all advantages are 0.
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

    def make_experience(
        self,
        inputs: object,
        *,
        policy_version: int | None = None,
        group_ids: Sequence[str] | None = None,
        extras: Sequence[str] = (),
        tags: Sequence[str] = (),
        **generate_kwargs: Any,
    ) -> Experience:
        """Sample `group_size` completions of each prompt and compare them.

        Args:
            inputs, policy_version, extras, tags, generate_kwargs: As for
                `NaiveExperienceMaker.make_experience`.
            group_ids: Names of the P groups; None: unique names.

        Returns:
            `P * group_size` samples on the actor's device; the samples of a prompt are neighbours.
            Token versions are noted as by `NaiveExperienceMaker`.

        Raises:
            RecordError: The inputs are malformed, or a network answers with another shape.
            ConfigError: An option of `generate` is out of range.
        """
        done, experience = self._sampled(
            inputs,
            policy_version=policy_version,
            group_ids=group_ids,
            extras=extras,
            tags=tags,
            **generate_kwargs,
        )
        with torch.no_grad(), evaluating(self.reward_model):
            return self._rewarded(experience, self.score(done))

    @property
    def makes_parts(self) -> bool:
        """Whether `make_parts` gives some groups of a batch before the others."""
        return self._rewards_in_parts(GRPOExperienceMaker)

    @torch.no_grad()
    def _sampled(
        self,
        inputs: object,
        *,
        policy_version: int | None = None,
        group_ids: Sequence[str] | None = None,
        extras: Sequence[str] = (),
        tags: Sequence[str] = (),
        **generate_kwargs: Any,
    ) -> tuple[Completions, Experience]:
        """Return groups of completions, and their experience without rewards and advantages."""
        tokens, mask = read_prompts(inputs, pad_token_id=generate_kwargs.get("pad_token_id"))
        names = [uuid.uuid4().hex for _ in tokens] if group_ids is None else list(group_ids)
        if len(names) != len(tokens):
            raise RecordError(
                f"{len(names)} group_ids came for {len(tokens)} prompts.", field="group_id"
            )
        size = self.group_size
        names = repeated(names, size)
        keys = {key: repeated(values, size) for key, values in further_keys(inputs).items()}
        batch = {"input_ids": repeated(tokens, size), "attention_mask": repeated(mask, size)}
        with evaluating(self.actor, self.initial_model):
            done = replace(self.sample({**batch, **keys}, **generate_kwargs), keys=keys)
            done = self._with_inputs(done, {**batch, **keys}, generate_kwargs)
            kl, tensors = self._divergence(done, generate_kwargs.get("temperature", 1.0))
        return done, Experience(
            sequences=done.sequences,
            action_log_probs=done.action_log_probs,
            values=None,
            reward=None,
            kl=kl,
            advantages=None,
            attention_mask=done.attention_mask,
            action_mask=done.action_mask,
            tensors={**tensors, **done.input_tensors()},
            policy_version=done.policy_version(policy_version),
            token_versions=done.token_versions,
            group_id=names,
            extras=chosen(keys, extras, len(done)),
            tags=chosen(keys, tags, len(done)),
        )

    def _rewarded(self, experience: Experience, reward: Tensor) -> Experience:
        """Return the experience with rewards and advantages."""
        advantages = group_relative_advantages(
            reward, group_size=self.group_size, scale_by_std=self.scale_by_std
        )
        return replace(experience, reward=reward, advantages=advantages)

    def _divergence(
        self, done: Completions, temperature: float
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return `kl` and `tensors`; None and an empty dict without a reference policy."""
        if self.initial_model is None:
            return None, {}
        reference = reference_log_probs(self.initial_model, done, temperature=temperature)
        kl = kl_estimate(done.action_log_probs, reference, done.action_mask)
        return kl, {REFERENCE_LOG_PROBS: reference}


@torch.no_grad()
def reference_log_probs(model: nn.Module, done: Completions, *, temperature: float) -> Tensor:
    """Return a policy's log-probability of each action, float32 `[B, A]`, 0 on padding."""
    actions = done.action_mask.shape[1]
    logits = action_logits(model, done.sequences, done.attention_mask, actions, inputs=done.inputs)
    log_probs = action_log_probs(logits, done.sequences, actions, temperature=temperature)
    return log_probs.to(done.sequences.device).masked_fill(~done.action_mask, 0.0)
