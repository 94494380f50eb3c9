"""`Completion`: one completion with its prompt, as reward functions see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from torch import Tensor

from redrb.errors import ConfigError, RecordError

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
        """Return a further key of the prompt.

        Raises:
            RecordError: The prompt has no such key.
        """
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
