"""`Trajectory`: the tokens of an episode, sampled ones and others, as one sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from redrb.errors import RecordError
from redrb.experience import BufferItem, Status
from redrb.experience.records import Scalar
from redrb.train.engines.completions import Generation
from redrb.train.engines.routing import Routing, joined, rows_of

ROUTED = "routed_experts"
"""Name of the tensor of a sample that has the experts of its tokens."""


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
        self._routed: Routing | None = None
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
        routed = partial.tensors.get(ROUTED)
        if routed is not None:
            if routed.dim() != 3 or len(routed) != len(sequences):
                raise RecordError(f"{ROUTED} of an unfinished sample has no row for each token.")
            self._routed = routed[: self._last_sampled].numpy()

    @property
    def actions(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[self._start :]

    @property
    def routed_tokens(self) -> int:
        """First tokens whose routed experts are known, for `Engine.generate`."""
        return rows_of(self._routed)

    @property
    def _last_sampled(self) -> int:
        """Index of the last token that was sampled; 0: none was."""
        return max((at for at, own in enumerate(self._mask, self._start) if own), default=0)

    def sampled(self, generation: Generation) -> Generation:
        """Append a completion; returns it.

        Raises:
            RecordError: Its routed experts do not go on from those before.
        """
        count = len(self.tokens) + len(generation.tokens)
        try:
            self._routed = joined(self._routed, 0, generation.routed_experts, count)
        except ValueError as error:
            raise RecordError(
                f"routed experts of a completion do not go on from those before ({error}): give "
                "`generate` routed_tokens=trajectory.routed_tokens, or nothing.",
                field=ROUTED,
            ) from error
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

        Where the server tells the experts of tokens, `tensors` has them as "routed_experts", a row
        for each token: `[S, layers, experts per token]`, in the server's dtype. A token's row is
        that of its first pass through the model. From the last sampled token on rows are 0: these
        tokens have not passed, and no trained token depends on them.

        Args:
            tags, extras: Of the sample.
        """
        known = [version for version in self._versions if version >= 0]
        tensors: dict[str, torch.Tensor] = {}
        if self._routed is not None and len(self._routed) >= self._last_sampled:
            rows = np.zeros((len(self.tokens), *self._routed.shape[1:]), self._routed.dtype)
            rows[: len(self._routed)] = self._routed
            tensors[ROUTED] = torch.from_numpy(rows)
        return BufferItem(
            sequences=torch.tensor(self.tokens, dtype=torch.int64),
            action_log_probs=torch.tensor(self._log_probs, dtype=torch.float32),
            reward=None if reward is None else torch.tensor(float(reward)),
            action_mask=torch.tensor(self._mask, dtype=torch.bool),
            tensors=tensors,
            policy_version=min(known, default=None),
            token_versions=torch.tensor(self._versions, dtype=torch.int64),
            status=Status.ABORTED if self.aborted else Status.COMPLETED,
            tags=dict(tags or {}),
            extras=dict(extras or {}),
        )
