"""`Completions`: a batch of prompts with sampled completions; `Completion`: one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from redrb.algorithms.models import NO_INPUTS, ModelInputs
from redrb.errors import ConfigError, RecordError
from redrb.experience.batching import token_aligned
from redrb.experience.padding import lengths_name

Decode: TypeAlias = Callable[[Tensor], str]
"""Returns the text of token ids, int64 `[T]`, such as the `decode` of a tokenizer."""


@dataclass(frozen=True, eq=False)
class Completion:
    """One completion and its prompt; `completion["key"]` is a further key of the prompt.

    Attributes:
        prompt: The further keys of the prompt, such as the reference answer.
        prompt_tokens: Token ids of the prompt without padding, int64 `[P]`.
        tokens: Token ids of the completion without padding, its EOS included, int64 `[T]`.
        finished: Whether it ended with EOS, and not at the limit of its length; None: not known.
        decode: Returns the text of token ids; None: there is no tokenizer.
    """

    prompt: Mapping[str, Any]
    prompt_tokens: Tensor
    tokens: Tensor
    finished: bool | None = None
    decode: Decode | None = field(default=None, repr=False)

    def __getitem__(self, key: str) -> Any:
        """Return a further key of the prompt, or raise RecordError."""
        try:
            return self.prompt[key]
        except KeyError:
            known = ", ".join(map(repr, self.prompt)) or "none"
            raise RecordError(
                f"the prompt has no key {key!r}; beside its tokens it has {known}.", field=key
            ) from None

    @property
    def length(self) -> int:
        """Tokens of the completion, its EOS included."""
        return int(self.tokens.shape[0])

    @cached_property
    def text(self) -> str:
        """The completion as text.

        Raises:
            ConfigError: There is no tokenizer.
        """
        return self._decoded(self.tokens)

    @cached_property
    def prompt_text(self) -> str:
        """The prompt as text.

        Raises:
            ConfigError: There is no tokenizer.
        """
        return self._decoded(self.prompt_tokens)

    def _decoded(self, tokens: Tensor) -> str:
        if self.decode is None:
            raise ConfigError(
                "completions have no text without a tokenizer: give "
                "redrb.algorithms.Reward(function, decode=tokenizer.decode)."
            )
        return self.decode(tokens)


@dataclass(frozen=True, eq=False)
class Completions:
    """Prompts with sampled completions; completions start at position S - A.

    Attributes:
        sequences: Prompt padded on the left, completion padded on the right, int64 `[B, S]`.
        attention_mask: 1 on prompt and completion, int64 `[B, S]`.
        action_mask: True on the completion, its EOS included, bool `[B, A]`.
        action_log_probs: Log-probability of each chosen token, 0 on padding, float32 `[B, A]`.
        token_versions: Version of the weights that computed each token, int64 `[B, A]`; -1 on
            padding and for unknown versions. None if no version is known.
        finished: Whether each completion ended with EOS, bool `[B]`; None: not known.
        keys: Further keys of the prompts: lists and tensors with B entries, by name.
        inputs: Those of the keys that the actor takes, such as images.
    """

    sequences: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    action_log_probs: Tensor
    token_versions: Tensor | None = None
    finished: Tensor | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    inputs: ModelInputs = NO_INPUTS

    def __len__(self) -> int:
        """Return the number of samples, B."""
        return self.sequences.shape[0]

    def prompt(self, row: int) -> Tensor:
        """Return the prompt of a row without padding, int64 `[P]`."""
        end = self.sequences.shape[1] - self.action_mask.shape[1]
        return self.sequences[row, :end][self.attention_mask[row, :end].bool()]

    def completion(self, row: int) -> Tensor:
        """Return the completion of a row without padding, int64 `[T]`."""
        start = self.sequences.shape[1] - self.action_mask.shape[1]
        return self.sequences[row, start:][self.action_mask[row]]

    def each(self, decode: Decode | None = None) -> list[Completion]:
        """Return every completion by itself, on the CPU; `decode` returns the text of token ids."""
        here = self.rows(range(len(self)), device="cpu")
        finished = [None] * len(here) if here.finished is None else here.finished.tolist()
        return [
            Completion(
                {key: values[row] for key, values in here.keys.items()},
                here.prompt(row),
                here.completion(row),
                finished[row],
                decode,
            )
            for row in range(len(here))
        ]

    def rows(self, rows: Sequence[int], *, device: str | torch.device | None = None) -> Completions:
        """Return some of the samples, padded as here, on a device; None: that of the tensors."""
        index = list(rows)

        def of(tensor: Tensor | None) -> Any:
            return None if tensor is None else tensor[index].to(device or tensor.device)

        keys = {
            key: values[index] if isinstance(values, Tensor) else [values[row] for row in index]
            for key, values in self.keys.items()
        }
        return Completions(
            of(self.sequences),
            of(self.attention_mask),
            of(self.action_mask),
            of(self.action_log_probs),
            of(self.token_versions),
            of(self.finished),
            keys,
            self.inputs.rows(torch.tensor(index, dtype=torch.int64)),
        )

    def input_tensors(self) -> dict[str, Tensor]:
        """Return the inputs as `Experience.tensors` holds them.

        Those that have the shape of `sequences` by chance get their lengths, see `token_aligned`.
        """
        found = self.inputs.tensors()
        for name in token_aligned(self.inputs.others, self.sequences):
            longest = torch.full((len(self),), self.sequences.shape[1])
            found.setdefault(lengths_name(name), longest)
        return found

    def policy_version(self, default: int | None = None) -> int | list[int | None] | None:
        """Return the oldest version of each completion's tokens; `default` where one is unknown."""
        if self.token_versions is None:
            return default
        unknown = torch.iinfo(torch.int64).max
        known = self.token_versions.masked_fill(~self.action_mask, unknown)
        oldest: list[int] = known.amin(1).tolist()
        return [version if 0 <= version < unknown else default for version in oldest]
