"""`EpisodeRecipe`: GRPO on episodes of several turns, such as calls of tools."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from redrb.errors import ConfigError
from redrb.options import option
from redrb.recipe.language import GRPORecipe

if TYPE_CHECKING:
    from torch import nn

    from redrb.connection import Client
    from redrb.experience import BufferItem
    from redrb.recipe.episode_maker import EpisodeRecipeMaker
    from redrb.recipe.local_engine import LocalEngine
    from redrb.watch.metrics.events import Write


class EpisodeRecipe(GRPORecipe):
    """GRPO on episodes: a user gives `model`, `prompts` and `episode`.

    An episode samples any number of times, and inserts what the policy did not write, such as the
    answer of a tool. Inserted tokens are not trained. A maker runs the episodes of
    `prompts_per_step` prompts at the same time, and samples those that wait for the model as one
    batch. Each group is sent when its last episode ends.

    Examples:
        >>> class Calls(EpisodeRecipe):
        ...     async def episode(self, prompt, engine):
        ...         trajectory = Trajectory(prompt["input_ids"])
        ...         trajectory.sampled(await engine.generate(trajectory.tokens))
        ...         trajectory.given(await answer_of_the_tool(trajectory.actions))
        ...         trajectory.sampled(await engine.generate(trajectory.tokens))
        ...         return trajectory.item(reward=score(trajectory.actions, prompt["answer"]))
    """

    order = "stalest"  # unlike "admission", it lets makers go on with aborted groups

    max_new_tokens: int = option(256, "longest completion of a turn, with its EOS", least=1)
    episode_timeout: float = option(
        300.0,
        "seconds that an episode may last; longer ones fail, and cost their group",
        above=0,
        agree=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlong_cache:
            raise ConfigError("leave --overlong-cache out: an episode gives its whole reward.")

    @classmethod
    def missing(cls) -> list[str]:
        """Return the names of methods that this class must have and lacks."""
        return sorted(cls.__abstractmethods__)  # rewards come with the samples

    @abstractmethod
    async def episode(
        self, prompt: dict[str, Any], engine: LocalEngine
    ) -> BufferItem | Sequence[BufferItem]:
        """Return the sample, or the samples, of one episode, with their rewards.

        An episode that raises costs its group, which is filtered; the log says why. When the maker
        ends, sampling returns what there is: then `trajectory.aborted` is true, and the episode
        returns `trajectory.item()` at once. A later maker runs it again; with a third parameter
        `partial` it gets the unfinished sample, from which `Trajectory(tokens, partial)` goes on.

        Args:
            prompt: The prompt's keys, and `input_ids`, its tokens.
            engine: `await engine.generate(tokens)` samples a completion. In later turns of a model
                with experts give `routed_tokens=trajectory.routed_tokens`, too.
        """

    def maker(self, client: Client, write: Write) -> EpisodeRecipeMaker:
        """Return a maker that runs episodes."""
        from redrb.recipe.episode_maker import EpisodeRecipeMaker, episode_of

        episode = episode_of(self, self.episode, self.episode_timeout)
        return EpisodeRecipeMaker(client, self, write, episode)

    def evaluate(self, models: dict[str, nn.Module]) -> Mapping[str, Any] | None:
        """Return the mean reward of an episode of each held-out prompt; None without any.

        An episode that fails is a failed reward. On the other ranks of a sharded model, None.
        """
        from redrb.recipe.evaluation import evaluated_episodes

        if not self._held_out:
            return None
        return evaluated_episodes(self, models["actor"], self._held_out)
