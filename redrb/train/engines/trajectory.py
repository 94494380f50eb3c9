"""`Trajectory`: the tokens of an episode, sampled ones and others, as one sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from redrb.errors import RecordError
from redrb.experience import BufferItem, Status
from redrb.experience.records import Scalar
from redrb.train.engines.completions import Generation


class Trajectory:
    """Collects what an engine samples and what an environment answers.

    Examples:
        >>> trajectory = Trajectory(prompt_tokens)
        >>> trajectory.sampled(await engine.generate(trajectory.tokens, max_new_tokens=64))
        >>> trajectory.given(tokenizer.encode(tool_answer))      # masked: not trained
        >>> trajectory.sampled(await engine.generate(trajectory.tokens, max_new_tokens=64))
        >>> item = trajectory.item(reward=1.0)

    Attributes:
        tokens: All tokens so far, the prompt first.
        aborted: Whether the newest sampling was aborted.
    """

    def __init__(self, prompt_tokens: Sequence[int], partial: BufferItem | None = None) -> None:
        """Begin an episode, or go on with the sample of one that was aborted.

        Args:
            partial: An unfinished sample of this prompt.

        Raises:
            RecordError: The sample does not begin with the prompt.
        """
        self.tokens = list(prompt_tokens)
        self.aborted = False
        self._start = len(self.tokens)
        self._log_probs: list[float] = []
        self._versions: list[int] = []
        self._mask: list[bool] = []
        if partial is None:
            return
        fields = (partial.sequences, partial.action_log_probs, partial.token_versions)
        sequences, log_probs, versions = (
            [] if tensor is None else tensor.tolist() for tensor in fields
        )
        mask = partial.action_mask
        start, actions = self._start, len(log_probs)
        if sequences[:start] != self.tokens or len(sequences) != start + actions:
            raise RecordError("an unfinished sample does not begin with its prompt.")
        self.tokens, self._log_probs = sequences, log_probs
        self._mask = [True] * actions if mask is None else mask.tolist()
        self._versions = versions or [-1] * actions

    @property
    def actions(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[self._start :]

    def sampled(self, generation: Generation) -> Generation:
        """Append a completion; returns it."""
        self.tokens += generation.tokens
        self._log_probs += generation.log_probs
        self._versions += generation.versions
        self._mask += [True] * len(generation.tokens)
        self.aborted = generation.finish == "abort"
        return generation

    def given(self, tokens: Sequence[int]) -> None:
        """Append tokens that the policy did not choose, such as the answer of a tool."""
        self.tokens += tokens
        self._log_probs += [0.0] * len(tokens)
        self._versions += [-1] * len(tokens)
        self._mask += [False] * len(tokens)

    def item(
        self,
        reward: float | None = None,
        *,
        tags: Mapping[str, Scalar] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> BufferItem:
        """Return the sample; its status is ABORTED if the newest sampling was aborted.

        Args:
            tags, extras: Of the sample.
        """
        known = [version for version in self._versions if version >= 0]
        return BufferItem(
            sequences=torch.tensor(self.tokens, dtype=torch.int64),
            action_log_probs=torch.tensor(self._log_probs, dtype=torch.float32),
            reward=None if reward is None else torch.tensor(float(reward)),
            action_mask=torch.tensor(self._mask, dtype=torch.bool),
            policy_version=min(known, default=None),
            token_versions=torch.tensor(self._versions, dtype=torch.int64),
            status=Status.ABORTED if self.aborted else Status.COMPLETED,
            tags=dict(tags or {}),
            extras=dict(extras or {}),
        )
