"""`Completion`: one completion with its prompt, as rewards see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Completion:
    """One completion and the prompt that it belongs to; `completion["key"]` is a key of the prompt.

    Attributes:
        prompt: The prompt, as the recipe's `prompts` gave it.
        prompt_tokens: Token ids of the prompt without padding, int64 `[P]`.
        tokens: Token ids of the completion without padding, with its EOS, int64 `[T]`.
        finished: Whether it ended with EOS, and not at the limit of its length.
        decode: Returns the text of token ids.
    """

    prompt: Mapping[str, Any]
    prompt_tokens: Tensor
    tokens: Tensor
    finished: bool
    decode: Callable[[Tensor], str] = field(repr=False)

    def __getitem__(self, key: str) -> Any:
        """Return a further key of the prompt, such as the reference answer."""
        return self.prompt[key]

    @property
    def length(self) -> int:
        """Number of tokens of the completion, with its EOS."""
        return int(self.tokens.shape[0])

    @cached_property
    def text(self) -> str:
        """The completion as text, without special tokens."""
        return self.decode(self.tokens)

    @cached_property
    def prompt_text(self) -> str:
        """The prompt as text, without special tokens."""
        return self.decode(self.prompt_tokens)
