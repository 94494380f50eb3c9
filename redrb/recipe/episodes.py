"""`EpisodeRecipe`: GRPO on episodes of several turns, such as calls of tools."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from redrb.options import option
from redrb.recipe.grpo import GRPORecipe
from redrb.recipe.language import EVALUATION_SEED

if TYPE_CHECKING:
    from torch import nn

    from redrb.experience import BufferItem
    from redrb.recipe.local_engine import LocalEngine
    from redrb.runtime import ExperienceMaker


class EpisodeRecipe(GRPORecipe):
    """GRPO on episodes: a user gives `model`, `prompts` and `episode`.

    An episode samples any number of times, and inserts what the policy did not write, such as the
    answer of a tool. Inserted tokens are not trained. All episodes of a batch of prompts run at the
    same time, and those that wait for the model are sampled as one batch.

    Example:
        >>> class Calls(EpisodeRecipe):
        ...     async def episode(self, prompt, engine):
        ...         trajectory = Trajectory(prompt["input_ids"])
        ...         trajectory.sampled(await engine.generate(trajectory.tokens))
        ...         trajectory.given(await answer_of_the_tool(trajectory.actions))
        ...         trajectory.sampled(await engine.generate(trajectory.tokens))
        ...         return trajectory.item(reward=score(trajectory.actions, prompt["answer"]))
    """

    max_new_tokens: int = option(256, "longest completion of a turn, with its EOS", least=1)
    episode_timeout: float = option(
        300.0, "seconds that an episode may last; longer ones fail, and cost their group", above=0
    )

    @classmethod
    def missing(cls) -> list[str]:
        """Return the names of methods that this class must have and lacks."""
        return sorted(cls.__abstractmethods__)  # rewards come with the samples

    @abstractmethod
    async def episode(
        self, prompt: dict[str, Any], engine: LocalEngine
    ) -> BufferItem | Sequence[BufferItem]:
        """Return the sample, or the samples, of one episode, with their rewards.

        An episode that raises costs its group, which is filtered; the log says why.

        Args:
            prompt: The prompt's keys, and `input_ids`, its tokens.
            engine: `await engine.generate(tokens)` samples a completion.
        """

    def experience_maker(
        self, models: dict[str, nn.Module], reference: nn.Module | None
    ) -> ExperienceMaker:
        """Return a maker that runs episodes."""
        from redrb.recipe.episode_groups import EpisodeGroups

        return EpisodeGroups(self, models["actor"], reference)

    def evaluate(self, models: dict[str, nn.Module]) -> Mapping[str, float] | None:
        """Return the mean reward of an episode of each held-out prompt; None without any."""
        import torch

        from redrb.algorithms.models import device_of
        from redrb.recipe.episode_groups import EpisodeGroups, rewards_of

        held_out = self._held_out
        if not held_out:
            return None
        actor = models["actor"]
        generator = torch.Generator(device_of(actor) or "cpu").manual_seed(EVALUATION_SEED)
        groups = EpisodeGroups(self, actor).run(held_out, 1, self.generation(generator))
        rewards = rewards_of(groups)
        return {"reward": float(rewards[rewards.isfinite()].mean())}
