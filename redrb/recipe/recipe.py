"""`Recipe`: a whole job in one class, which makers and the trainer run."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Awaitable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from redrb.errors import ConfigError
from redrb.options import option
from redrb.recipe.job_settings import JobSettings, MakerSettings, TrainerSettings

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from redrb.connection import Client
    from redrb.experience import BufferItem, Experience
    from redrb.recipe.agent_maker import AgentRecipeMaker
    from redrb.recipe.episode_maker import EpisodeRecipeMaker
    from redrb.recipe.maker import RecipeMaker
    from redrb.train import ExperienceMaker
    from redrb.watch.metrics.events import Write

Prompt: TypeAlias = Mapping[str, Any]
"""What one group is made of; for language models `redrb.recipe.language` says its keys."""


class Recipe(JobSettings, MakerSettings, TrainerSettings):
    """A job: its models, prompts, the way from a prompt to a group, and the training step.

    Makers call `models`, `prompts` and `rollout`; the trainer calls `models`, `initialise`,
    `optimizers`, `step` and `evaluate`. `PPORecipe` and `GRPORecipe` have all of them for language
    models, except model, prompts and reward. What is loaded once per process, such as a tokenizer
    or a dataset, is a `functools.cached_property`.

    Examples:
        >>> class Walk(Recipe):
        ...     steps = 500                                       # another default of a setting
        ...     hidden: int = option(64, "width of the network")  # a setting of this recipe
    """

    reward_above: float = option(-math.inf, "makers drop groups unless their mean reward is above")
    reward_below: float = option(math.inf, "makers drop groups unless their mean reward is below")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.reward_above < self.reward_below:
            raise ConfigError("--reward-above must be less than --reward-below: no group is left.")

    @property
    def drops_groups(self) -> bool:
        """Whether makers drop groups by their mean reward."""
        return self.reward_above > -math.inf or self.reward_below < math.inf

    @classmethod
    def missing(cls) -> list[str]:
        """Return the names of methods that this class must have and lacks."""
        return sorted(cls.__abstractmethods__)

    @abstractmethod
    def models(self) -> dict[str, nn.Module]:
        """Return the models in training, by name; each version of the weights holds all of them."""

    @abstractmethod
    def prompts(self) -> Iterable[Prompt]:
        """Return the prompts; when they end, this is called again for the next pass."""

    @abstractmethod
    def rollout(
        self, models: dict[str, nn.Module], prompt: Prompt
    ) -> list[BufferItem] | Experience | Awaitable[list[BufferItem] | Experience]:
        """Return the samples of one prompt, which are stored as one group; may be a coroutine.

        Models are in eval mode and have the newest weights; gradients are off. A rollout that
        raises, returns no samples, or as a coroutine lasts longer than `rollout_timeout`, costs its
        group, which is filtered; the log says why.
        """

    @abstractmethod
    def optimizers(self, models: dict[str, nn.Module]) -> dict[str, Optimizer]:
        """Return optimizers by name; checkpoints hold them."""

    @abstractmethod
    def step(
        self,
        models: dict[str, nn.Module],
        optimizers: dict[str, Optimizer],
        experience: Experience,
    ) -> Mapping[str, Any]:
        """Train on one batch and return metrics by name."""

    def initialise(self, models: dict[str, nn.Module]) -> None:
        """Change the models before the first version is published, such as by supervised steps.

        Only the first trainer of a job calls it; later ones load the published weights. Where Redis
        has lost a reference policy, a trainer calls it again, and publishes the same policy.
        """

    def evaluate(self, models: dict[str, nn.Module]) -> Mapping[str, Any] | None:  # noqa: ARG002
        """Return metrics of the models, `reward` among them; None: only training rewards are known.

        With a number of `failed` rewards above 0, or without a finite `reward`, the target is not
        reached, whatever `reward` is: the rewards that are there may be those of right answers.
        Models are in eval mode; gradients are off.
        """
        return None

    def held_out(self) -> Iterable[Prompt]:
        """Return prompts for evaluation, which makers do not get."""
        return ()

    def maker(
        self, client: Client, write: Write
    ) -> RecipeMaker | EpisodeRecipeMaker | AgentRecipeMaker:
        """Return the maker that `redrb-maker` runs; it is a context manager."""
        from redrb.recipe.maker import RecipeMaker

        return RecipeMaker(client, self, write)

    def experience_maker(
        self,
        models: dict[str, nn.Module],
        reference: nn.Module | None,  # noqa: ARG002 (for recipes with a reference policy)
    ) -> ExperienceMaker:
        """Return the object that makes groups of a list of prompts; default: it calls `rollout`."""
        from redrb.recipe.groups import RolloutGroups

        return RolloutGroups(self, models)

    def generation(self, generator: torch.Generator) -> dict[str, Any]:  # noqa: ARG002
        """Return options for each call of `experience_maker(...).make_experience`.

        Args:
            generator: Source of randomness of this maker, on the device of its models.
        """
        return {}

    def reference(self, models: dict[str, nn.Module]) -> nn.Module | None:  # noqa: ARG002
        """Return the model among `models` whose first weights are the reference policy; None: none.

        The first trainer publishes these weights once, and makers load a copy of them.
        """
        return None
