"""`LanguageRecipe`: tokenizer, prompts, rewards and generation of recipes for language models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from redrb.errors import ConfigError
from redrb.options import option
from redrb.recipe.recipe import Prompt, Recipe
from redrb.recipe.step_settings import StepSettings

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from redrb.algorithms import Completion
    from redrb.experience import Experience

EVALUATION_SEED = 7
"""Seed of the completions of held-out prompts: the same weights always have the same score."""


class LanguageRecipe(Recipe, StepSettings):
    """Base of recipes that sample completions of prompts from a causal model and score them.

    A prompt is a dict with `prompt`, which is a text or a list of chat messages for the tokenizer's
    chat template, or with `input_ids`, which are ints or int64 `[P]`. All its further keys reach
    `reward` as `completion["key"]`.

    Attributes:
        extras: Keys of prompts that are stored with each sample, in its extras.
        tags: Keys of prompts that are stored as tags, by which groups can be selected.
    """

    extras: ClassVar[Sequence[str]] = ()
    tags: ClassVar[Sequence[str]] = ()

    max_new_tokens: int = option(256, "longest completion in tokens, with its EOS", least=1)
    temperature: float = option(1.0, "temperature of sampling", above=0)
    top_k: int = option(0, "sample from the k most probable tokens only; 0: from all", least=0)
    top_p: float = option(1.0, "sample from the most probable tokens of this mass", above=0, most=1)
    model_dtype: str = option("float32", "dtype in which a named model is loaded", agree=False)

    @classmethod
    def missing(cls) -> list[str]:
        """Return the names of methods that this class must have and lacks."""
        scores = cls.reward is LanguageRecipe.reward and cls.rewards is LanguageRecipe.rewards
        return [*super().missing(), *(["reward"] if scores else [])]

    @abstractmethod
    def model(self) -> Any:
        """Return the policy: a module, a Hugging Face folder or name, or a transformers config.

        `redrb.algorithms.models` says how modules are called.
        """

    def reward(self, completion: Completion) -> float:  # noqa: ARG002 (for subclasses)
        """Return the reward of one completion; it may be a coroutine function.

        A group whose reward raises, or is None, nan or infinite, is filtered, and the log says why.
        """
        raise ConfigError(f"the recipe {type(self).__name__} lacks reward(self, completion).")

    def rewards(self, completions: Sequence[Completion]) -> Sequence[float]:  # noqa: ARG002
        """Return the reward of each completion; override it to score all of them at once."""
        raise ConfigError(f"the recipe {type(self).__name__} scores completions one by one.")

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, as those of transformers; default: that of the model's folder or name."""
        from redrb.recipe.pretrained import tokenizer_of

        return tokenizer_of(self._model)

    @property
    def eos_token_id(self) -> int | Sequence[int] | None:
        """Token, or tokens, that end a completion; default: the tokenizer's."""
        found: int | None = self.tokenizer.eos_token_id
        return found

    @property
    def pad_token_id(self) -> int:
        """Token for padding; default: the tokenizer's, or else that of EOS."""
        found: int | None = self.tokenizer.pad_token_id
        return found if found is not None else (self.ends or [0])[0]

    @property
    def ends(self) -> list[int]:
        """The tokens that end a completion."""
        eos = self.eos_token_id
        return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)

    def encode(self, prompt: Prompt) -> Tensor:
        """Return the token ids of a prompt, int64 `[P]`."""
        from redrb.recipe.pretrained import encoded

        return encoded(prompt, lambda: self.tokenizer)

    def decode(self, tokens: Tensor) -> str:
        """Return the text of token ids, without special tokens."""
        text: str = self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
        return text

    def generation(self, generator: torch.Generator | None = None) -> dict[str, Any]:
        """Return the options of `redrb.algorithms.generate`."""
        return {
            "generator": generator,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k or None,
            "top_p": self.top_p if self.top_p < 1 else None,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
        }

    def models(self) -> dict[str, nn.Module]:
        """Return the policy as `actor`."""
        from redrb.recipe.pretrained import built

        return {"actor": built(self._model, self.model_dtype)}

    @abstractmethod
    def algorithm(
        self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
    ) -> Callable[[Experience], Mapping[str, Any]]:
        """Return the training step."""

    def step(
        self,
        models: dict[str, nn.Module],
        optimizers: dict[str, Optimizer],
        experience: Experience,
    ) -> Mapping[str, Any]:
        """Take one step of `algorithm`."""
        return self.algorithm(models, optimizers)(experience)

    def rollout(self, models: dict[str, nn.Module], prompt: Prompt) -> Experience:
        """Return the scored completions of one prompt; makers sample those of many at once."""
        maker = self.experience_maker(models, None)
        return maker.make_experience([prompt], **self.generation())

    def evaluate(self, models: dict[str, nn.Module]) -> Mapping[str, Any] | None:
        """Return the mean reward of a completion of each held-out prompt; None without any.

        Rewards that fail do not count in the mean: `failed` says how many did, `why_failed` why,
        and `samples` how many rewards there are. Without a single one `reward` is None.

        Completions are sampled with a fixed seed, as makers sample them: this measures the policy
        that makes the experience, and not its most probable completions.
        """
        from redrb.recipe.sampling import evaluated

        held_out = self._held_out
        if not held_out:
            return None
        return evaluated(self, models["actor"], held_out, seed=EVALUATION_SEED)

    @cached_property
    def _model(self) -> Any:
        return self.model()

    @cached_property
    def _held_out(self) -> list[Prompt]:
        held_out: Iterable[Prompt] = self.held_out()
        return list(held_out)
