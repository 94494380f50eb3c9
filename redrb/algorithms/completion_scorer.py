"""`CompletionScorer`: the base of experience makers, which samples completions and scores them."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from redrb.algorithms.completions import Completions
from redrb.algorithms.generation import check_options, generate
from redrb.algorithms.prompt_inputs import prompt_inputs
from redrb.algorithms.reward import Reward
from redrb.algorithms.scoring import Scorer, scores_of
from redrb.experience import Experience
from redrb.experience.rows import select_rows


class CompletionScorer(ABC):
    """Base of experience makers: samples completions of the actor and scores them.

    Attributes:
        actor: Behaviour policy.
        reward_model: A reward model, a `Reward`, or a function of `Completions`.
        group_size: Completions of a prompt.
    """

    actor: nn.Module
    reward_model: Scorer
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
            check_options(options, own)

    @abstractmethod
    def make_experience(self, inputs: object, **generate_kwargs: Any) -> Experience:
        """Return the experience of a batch of prompts."""

    @property
    def makes_parts(self) -> bool:
        """Whether `make_parts` gives some groups of a batch before the others."""
        return False

    def make_parts(self, inputs: object, **options: Any) -> Iterator[Experience]:
        """Yield the experience of a batch in parts: groups whose rewards come first go first.

        Args:
            inputs, options: As for `make_experience`.
        """
        if not self.makes_parts or not isinstance(self.reward_model, Reward):
            yield self.make_experience(inputs, **options)
            return
        done, experience = self._sampled(inputs, **options)
        for rows, rewards in self.reward_model.as_ready(done, self.group_size):
            raw = torch.tensor(rewards, device=done.sequences.device)
            whole = rows == list(range(len(experience)))
            yield self._rewarded(experience if whole else select_rows(experience, rows), raw)

    def _with_inputs(
        self, done: Completions, prompts: object, options: Mapping[str, Any]
    ) -> Completions:
        """Return completions with the actor's inputs, also those of another inference engine."""
        found = prompt_inputs(self.actor, prompts, pad_token_id=options.get("pad_token_id"))
        return replace(done, inputs=found.extended(done.action_mask.shape[1]))

    def score(self, completions: Completions) -> Tensor:
        """Return the raw reward of each completion, float32 `[B]`."""
        return scores_of(self.reward_model, completions, self.group_size)

    def _rewards_in_parts(self, own: type[CompletionScorer]) -> bool:
        """Return whether rewards come in parts, and no subclass of `own` scores in another way."""
        made = type(self)
        return (
            isinstance(self.reward_model, Reward)
            and self.reward_model.comes_in_parts
            and made.score is CompletionScorer.score
            and made.make_experience is own.make_experience
        )

    def _sampled(self, inputs: object, **options: Any) -> tuple[Completions, Experience]:
        """Return completions, and their experience without rewards and advantages."""
        raise NotImplementedError

    def _rewarded(self, experience: Experience, raw: Tensor) -> Experience:
        """Return the experience with rewards and advantages."""
        raise NotImplementedError
