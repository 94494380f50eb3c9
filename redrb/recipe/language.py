"""Recipes for language models: their prompts, rewards and generation; PPO and GRPO."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from redrb.errors import ConfigError
from redrb.options import option
from redrb.recipe.job_settings import EngineSettings, StepSettings
from redrb.recipe.recipe import Prompt, Recipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from redrb.algorithms import Completion, GRPOStep, Overlong, PPOStep, Reward
    from redrb.connection import Client
    from redrb.experience import Experience
    from redrb.recipe.agent_maker import AgentRecipeMaker
    from redrb.recipe.episode_maker import EpisodeRecipeMaker
    from redrb.recipe.maker import RecipeMaker
    from redrb.train import ExperienceMaker
    from redrb.watch.metrics.events import Write


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

    def scorer(self) -> Reward:
        """Return the rewards: `rewards` for all completions if it is overridden, else `reward`."""
        from redrb.algorithms import Reward

        batched = type(self).rewards is not LanguageRecipe.rewards
        function = self.rewards if batched else self.reward
        return Reward(function, decode=self.decode, batched=batched)

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
        from redrb.recipe.evaluation import evaluated

        if not self._held_out:
            return None
        return evaluated(self, models["actor"], self._held_out, self.scorer())

    @cached_property
    def _model(self) -> Any:
        return self.model()

    @cached_property
    def _held_out(self) -> list[Prompt]:
        held_out: Iterable[Prompt] = self.held_out()
        return list(held_out)


class PPORecipe(LanguageRecipe):
    """PPO: a user gives `model`, `prompts` and `reward`.

    Advantages are those of GAE, made by makers; values learn the returns. With `kl_coef` above 0,
    each action pays for its divergence from the first weights of the policy.
    """

    gamma: float = option(1.0, "discount a token", least=0, most=1)
    lam: float = option(
        0.95, "GAE's lambda: 0 trusts the critic, 1 the sampled return", least=0, most=1
    )
    kl_coef: float = option(
        0.01, "weight of the KL divergence from the reference policy, in rewards a nat", least=0
    )
    actor_learning_rate: float = option(1e-6, "of Adam, for the actor", least=0, agree=False)
    critic_learning_rate: float = option(1e-5, "of Adam, for the critic", least=0, agree=False)
    value_clip: float = option(
        0.5, "how far a value may move from the value at the time of making", above=0, agree=False
    )
    entropy_coef: float = option(0.0, "weight of the entropy bonus", least=0, agree=False)

    def models(self) -> dict[str, nn.Module]:
        """Return the policy as `actor`, and its critic."""
        models = super().models()
        return {**models, "critic": self.critic(models["actor"])}

    def critic(self, actor: nn.Module) -> nn.Module:
        """Return the critic; default: a second copy of the policy with a head for values."""
        import copy

        from redrb.algorithms import ValueHead

        return ValueHead(copy.deepcopy(actor))

    def optimizers(self, models: dict[str, nn.Module]) -> dict[str, Optimizer]:
        """Return Adam for the actor and for the critic."""
        import torch

        rates = {"actor": self.actor_learning_rate, "critic": self.critic_learning_rate}
        return {
            name: torch.optim.Adam(
                [each for each in models[name].parameters() if each.requires_grad], lr=rate
            )
            for name, rate in rates.items()
        }

    def algorithm(self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]) -> PPOStep:
        """Return the training step; override it for other options."""
        from redrb.algorithms import PPOStep

        return PPOStep(
            models["actor"],
            models["critic"],
            optimizers["actor"],
            optimizers["critic"],
            value_clip=self.value_clip,
            value_target="returns",
            entropy_coef=self.entropy_coef,
            normalise_advantages=True,
            temperature=self.temperature,
            **self.step_options,
        )

    def reference(self, models: dict[str, nn.Module]) -> nn.Module | None:
        """Return the actor if the divergence from its first weights has a price."""
        return models["actor"] if self.kl_coef > 0 else None

    def experience_maker(
        self, models: dict[str, nn.Module], reference: nn.Module | None
    ) -> ExperienceMaker:
        """Return a maker of completions with values and GAE's advantages."""
        from redrb.algorithms import GAE, NaiveExperienceMaker
        from redrb.recipe.groups import CompletionGroups

        actor, critic = models["actor"], models["critic"]
        maker = NaiveExperienceMaker(
            actor,
            critic,
            self.scorer(),
            actor if reference is None else reference,
            kl_coef=self.kl_coef,
            gae=GAE(gamma=self.gamma, lam=self.lam),
        )
        maker.group_size = self.group_size
        return CompletionGroups(self, maker)


class GRPORecipe(LanguageRecipe, EngineSettings):
    """GRPO: a user gives `model`, `prompts` and `reward`.

    Each completion is compared with the other completions of its prompt. With `beta` above 0, the
    loss has a term for the divergence from the first weights of the policy. With `engine` "vllm" or
    "sglang", makers sample from an inference server, which gets each new version of the weights.

    Examples:
        >>> class Sums(GRPORecipe):
        ...     def model(self):
        ...         return "Qwen/Qwen2.5-0.5B"
        ...     def prompts(self):
        ...         return [{"prompt": f"{a}+{a}=", "answer": str(a + a)} for a in range(100)]
        ...     def reward(self, completion):
        ...         return float(completion.text.strip() == completion["answer"])
    """

    learning_rate: float = option(1e-6, "of AdamW", least=0, agree=False)
    beta: float = option(0.0, "weight of the divergence from the reference policy", least=0)
    scale_by_std: bool = option(
        True, "divide advantages by the group's standard deviation; no: Dr. GRPO"
    )
    advantages: str = option(
        "grpo", "how samples are compared", choices=("grpo", "rloo", "reinforce++")
    )
    overlong_cache: int = option(
        0, "last of max_new_tokens, over which DAPO's punishment of length grows; 0: none", least=0
    )
    lora_rank: int = option(
        0, "rank of LoRA on all linear layers, which alone are trained; 0: train all", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlong_cache > self.max_new_tokens:
            raise ConfigError("--overlong-cache must be at most --max-new-tokens.")

    def models(self) -> dict[str, nn.Module]:
        """Return the policy as `actor`, with LoRA layers if `lora_rank` is above 0."""
        models = super().models()
        if self.lora_rank:
            from redrb.recipe.pretrained import with_lora

            models["actor"] = with_lora(models["actor"], self.lora_rank)
        return models

    @property
    def overlong(self) -> Overlong | None:
        """The punishment of long completions; None: there is none. Override it for another size."""
        from redrb.algorithms import Overlong

        cache = self.overlong_cache
        return Overlong(limit=self.max_new_tokens, cache=cache) if cache else None

    def maker(
        self, client: Client, write: Write
    ) -> RecipeMaker | EpisodeRecipeMaker | AgentRecipeMaker:
        """Return a maker that samples with its own model, or from the inference server."""
        if self.engine == "local":
            return super().maker(client, write)
        from redrb.recipe.episode_maker import EpisodeRecipeMaker

        return EpisodeRecipeMaker(client, self, write)

    def optimizers(self, models: dict[str, nn.Module]) -> dict[str, Optimizer]:
        """Return AdamW for the actor."""
        import torch

        trained = [each for each in models["actor"].parameters() if each.requires_grad]
        return {"actor": torch.optim.AdamW(trained, lr=self.learning_rate)}

    def algorithm(self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]) -> GRPOStep:
        """Return the training step; override it for other options."""
        from redrb.algorithms import GRPOStep

        return GRPOStep(
            models["actor"],
            optimizers["actor"],
            beta=self.beta,
            temperature=self.temperature,
            scale_by_std=self.scale_by_std,
            method=self.advantages,  # type: ignore[arg-type]
            normalise_advantages=self.advantages == "reinforce++",
            **self.step_options,
        )

    def reference(self, models: dict[str, nn.Module]) -> nn.Module | None:
        """Return the actor if the divergence from its first weights has a price."""
        return models["actor"] if self.beta > 0 else None

    def experience_maker(
        self, models: dict[str, nn.Module], reference: nn.Module | None
    ) -> ExperienceMaker:
        """Return a maker of completions with advantages relative to their group."""
        from redrb.algorithms import GRPOExperienceMaker
        from redrb.recipe.groups import CompletionGroups

        maker = GRPOExperienceMaker(
            models["actor"],
            self.scorer(),
            reference,
            group_size=self.group_size,
            scale_by_std=self.scale_by_std,
            method=self.advantages,  # type: ignore[arg-type]
            overlong=self.overlong,
        )
        return CompletionGroups(self, maker)
