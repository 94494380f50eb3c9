"""Experience makers: they turn prompts into batches with every field that a trainer needs."""

from __future__ import annotations

import inspect
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from redrb.algorithms.advantages import (
    GAE,
    AdvantageMethod,
    Overlong,
    compute_reward,
    gae,
    group_relative_advantages,
    token_rewards,
)
from redrb.algorithms.batches import REFERENCE_LOG_PROBS, TrainingBatch
from redrb.algorithms.completions import Completions
from redrb.algorithms.generation import check_options, generate
from redrb.algorithms.log_probs import action_log_probs
from redrb.algorithms.losses import KLEstimator, kl_estimate
from redrb.algorithms.models import action_logits, action_values, evaluating
from redrb.algorithms.policy_step import check_not_negative
from redrb.algorithms.prompts import chosen, further_keys, prompt_inputs, read_prompts, repeated
from redrb.algorithms.reward import Reward, Scorer, scores_of
from redrb.checks import check_choice
from redrb.errors import ConfigError, RecordError
from redrb.experience import Experience
from redrb.experience.records import named_tensors
from redrb.experience.rows import select_rows

RAW_REWARD = "raw_reward"
"""Key in `Experience.tensors` of the reward model's score, before any price, float32 `[B]`."""


class CompletionScorer(ABC):
    """Base of experience makers: samples completions of the actor, scores and compares them.

    Networks run in eval mode without gradients and get their old modes back. Subclasses override
    `sample` and `score`.

    Attributes:
        critic: The critic; None: there is none.
        reward_model: A reward model, a `Reward`, or a function of `Completions`.
        initial_model: The policy from which the divergence is measured; None: there is none.
        kl_estimator: Estimator of the divergence; see `redrb.algorithms.kl_estimate`.
    """

    actor: nn.Module
    critic: nn.Module | None = None
    reward_model: Scorer
    initial_model: nn.Module | None
    kl_estimator: KLEstimator = "k3"
    group_size: int = 1

    def sample(self, inputs: object, **generate_kwargs: Any) -> Completions:
        """Return a completion of each prompt; override it for another inference engine."""
        return generate(self.actor, inputs, **generate_kwargs)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Check options of `make_experience` before there are prompts.

        A subclass with another `sample` has options of its own, which are not checked.

        Raises:
            ConfigError: An option is unknown or out of range, or no length limit is given.
        """
        if type(self).sample is CompletionScorer.sample:
            own = inspect.signature(self.make_experience).parameters
            check_options(options, {**inspect.signature(self._sampled).parameters, **own})

    def make_experience(self, inputs: object, **options: Any) -> Experience:
        """Sample `group_size` completions of each prompt and fill the fields of the algorithm.

        Args:
            inputs: Prompts, as for `redrb.algorithms.generate`.
            options: Options of `redrb.algorithms.generate`, and: `policy_version`, the weight
                version of the actor, for samples without known token versions; `extras` and `tags`,
                the further keys of the prompts that become extras and tags of the samples.

        Returns:
            The samples of P prompts, `P * group_size`, on the actor's device; those of a prompt are
            neighbours. Completions start at S - A; prompts are padded on the left, completions on
            the right. With the option `before_token`, `token_versions` note the weights of each
            token, and `policy_version` is the oldest version of a sample.

        Raises:
            RecordError: The inputs are malformed, or a network answers with another shape.
            ConfigError: An option of `generate` is out of range.
        """
        done, experience = self._sampled(inputs, **options)
        with torch.no_grad(), evaluating(self.reward_model):
            return self._rewarded(experience, self.score(done))

    def make_parts(self, inputs: object, **options: Any) -> Iterator[Experience]:
        """Yield the experience of a batch in parts: groups whose rewards come first go first.

        There is one part if the rewards come together, or a subclass scores in another way.

        Args:
            inputs, options: As for `make_experience`.
        """
        made, base = type(self), CompletionScorer
        together = made.score is not base.score or made.make_experience is not base.make_experience
        reward = self.reward_model
        if together or not isinstance(reward, Reward) or not reward.comes_in_parts:
            yield self.make_experience(inputs, **options)
            return
        done, experience = self._sampled(inputs, **options)
        for rows, rewards in reward.as_ready(done, self.group_size):
            raw = torch.tensor(rewards, device=done.sequences.device)
            whole = rows == list(range(len(experience)))
            yield self._rewarded(experience if whole else select_rows(experience, rows), raw)

    def score(self, completions: Completions) -> Tensor:
        """Return the raw reward of each completion, float32 `[B]`."""
        return scores_of(self.reward_model, completions, self.group_size)

    def value(self, completions: Completions) -> Tensor | None:
        """Return the critic's values, float32 `[B]`, or `[B, A]` with 0 on padding; None: none."""
        if self.critic is None:
            return None
        mask = completions.action_mask
        values = action_values(
            self.critic,
            completions.sequences,
            completions.attention_mask,
            mask.shape[1],
            inputs=completions.inputs,
        )
        return values if values.dim() == 1 else values.masked_fill(~mask, 0.0)

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
        """Return completions, and their experience without rewards and advantages."""
        keys, size, pad = further_keys(inputs), self.group_size, generate_kwargs.get("pad_token_id")
        names = None
        if size > 1:
            tokens, mask = read_prompts(inputs, pad_token_id=pad)
            names = repeated([uuid.uuid4().hex for _ in tokens], size)
            keys = {key: repeated(values, size) for key, values in keys.items()}
            batch = {"input_ids": repeated(tokens, size), "attention_mask": repeated(mask, size)}
            inputs = {**batch, **keys}
        with evaluating(self.actor, self.critic, self.initial_model):
            done = replace(self.sample(inputs, **generate_kwargs), keys=keys)
            # the actor's inputs, also those of another inference engine
            found = prompt_inputs(self.actor, inputs, pad_token_id=pad)
            done = replace(done, inputs=found.extended(done.action_mask.shape[1]))
            kl, tensors, log_probs = None, done.input_tensors(), done.action_log_probs
            if self.initial_model is not None:
                temperature = generate_kwargs.get("temperature", 1.0)
                reference = reference_log_probs(self.initial_model, done, temperature=temperature)
                kl = kl_estimate(
                    log_probs, reference, done.action_mask, estimator=self.kl_estimator
                )
                if self.critic is None:  # the divergence is a term of the loss, not of the reward
                    tensors[REFERENCE_LOG_PROBS] = reference
            values = self.value(done)
        return done, Experience(
            sequences=done.sequences,
            action_log_probs=log_probs,
            values=values,
            reward=None,
            kl=kl,
            advantages=None,
            attention_mask=done.attention_mask,
            action_mask=done.action_mask,
            tensors=tensors,
            policy_version=done.policy_version(policy_version),
            token_versions=done.token_versions,
            group_id=names,
            extras=chosen(keys, extras, len(done)),
            tags=chosen(keys, tags, len(done)),
        )

    @abstractmethod
    def _rewarded(self, experience: Experience, raw: Tensor) -> Experience:
        """Return the experience with rewards and advantages."""


class NaiveExperienceMaker(CompletionScorer):
    """Makes experience for PPO with four networks, as ColossalAI's `coati` does.

    By default the divergence from `initial_model` lowers `reward` to `raw - kl_coef * mean kl`,
    `advantages` are `reward - values`, and `tensors["raw_reward"]` keeps the raw reward. With
    `gae`, each action pays for its divergence instead: `reward` is raw, and `advantages` are those
    of GAE. In both cases `kl` is the estimate at each action. Subclasses may override `value` too.

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
        self.kl_estimator = kl_estimator

    def _rewarded(self, experience: Experience, raw: Tensor) -> Experience:
        """Return the experience with rewards and advantages, these in the shape of the values."""
        fields = named_tensors(experience)
        values, kl, mask = (fields[name] for name in ("values", "kl", "action_mask"))
        if self.gae is None:
            reward = compute_reward(raw, kl, mask, kl_coef=self.kl_coef)
            advantages = (
                reward - values
                if values.dim() == 1
                else (reward[:, None] - values).masked_fill(~mask, 0.0)
            )
            tensors = experience.tensors | {RAW_REWARD: raw}
            return replace(experience, reward=reward, advantages=advantages, tensors=tensors)
        if values.dim() == 1:
            raise RecordError(
                "GAE needs a value at each action, and the critic gives one a sample: let it "
                "answer [B, S], or leave gae out.",
                field="values",
            )
        rewards = token_rewards(raw, kl, mask, kl_coef=self.kl_coef)
        advantages = gae(rewards, values, mask, gamma=self.gae.gamma, lam=self.gae.lam)
        return replace(experience, reward=raw, advantages=advantages)


class GRPOExperienceMaker(CompletionScorer):
    """Makes groups of completions and compares each with its group, without a critic.

    `advantages` `[B]` are relative to the group, `reward` is raw, and `values` is None. With
    `overlong`, `reward` is less the punishment, and `tensors["raw_reward"]` is raw. With an
    `initial_model`, `kl` is the estimate k3, and `tensors["reference_log_probs"]` holds the
    log-probabilities from which GRPO's loss takes its divergence; otherwise `kl` is None.

    Args:
        actor: Behaviour policy; `redrb.algorithms.models` says how networks are called.
        reward_model: A reward model, a `Reward`, or a function of `Completions` that returns `[B]`.
        initial_model: The reference policy.
        group_size: Completions of each prompt, >= 1; with one, all advantages are 0.
        scale_by_std: False leaves out the division by the group's standard deviation (Dr. GRPO).
        method: How a sample is compared with its group; see `group_relative_advantages`.
        overlong: Punishment of long completions; None: there is none.

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
        method: AdvantageMethod = "grpo",
        overlong: Overlong | None = None,
    ) -> None:
        if group_size < 1:
            raise ConfigError(f"group_size {group_size} must be at least 1.")
        self.actor, self.reward_model, self.initial_model = actor, reward_model, initial_model
        self.group_size, self.scale_by_std = group_size, scale_by_std
        self.method, self.overlong = method, overlong

    def _rewarded(self, experience: Experience, raw: Tensor) -> Experience:
        """Return the experience with rewards and advantages."""
        reward, tensors = raw, experience.tensors
        if self.overlong is not None:
            reward = raw + self.overlong(named_tensors(experience)["action_mask"].sum(1))
            tensors = tensors | {RAW_REWARD: raw}
        advantages = group_relative_advantages(
            reward, group_size=self.group_size, scale_by_std=self.scale_by_std, method=self.method
        )
        return replace(experience, reward=reward, advantages=advantages, tensors=tensors)


@torch.no_grad()
def reference_log_probs(
    model: nn.Module, done: Completions | TrainingBatch, *, temperature: float
) -> Tensor:
    """Return a policy's log-probability of each action, float32 `[B, A]`, 0 on padding."""
    actions = done.action_mask.shape[1]
    logits = action_logits(model, done.sequences, done.attention_mask, actions, inputs=done.inputs)
    log_probs = action_log_probs(logits, done.sequences, actions, temperature=temperature)
    return log_probs.to(done.sequences.device).masked_fill(~done.action_mask, 0.0)
