"""`AgentRecipe`: GRPO on agents, which speak OpenAI's or Anthropic's protocol, and no tokens."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from redrb.errors import ConfigError
from redrb.options import option
from redrb.recipe.language import GRPORecipe
from redrb.recipe.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

    from redrb.connection import Client
    from redrb.gateway.client import AgentSession
    from redrb.recipe.agent_maker import AgentRecipeMaker
    from redrb.watch.metrics.events import Write


class AgentRecipe(GRPORecipe):
    """GRPO on agents: a user gives `model`, `prompts` and `agent`.

    A maker runs `group_size` agents for each of `prompts_per_step` prompts at the same time. What
    they sample comes from the vLLM at `engine_url`, through a gateway in the maker's process, and
    is stored turn by turn as it was sampled. A turn has at most `max_new_tokens` tokens, and the
    recipe's `temperature`, `top_p` and `top_k`. The trainer compares the rewards of a group.

    Examples:
        >>> class Answers(AgentRecipe):
        ...     async def agent(self, prompt, session):
        ...         messages = [{"role": "user", "content": prompt["question"]}]
        ...         message = await session.chat(messages)
        ...         return float(message["content"] == prompt["answer"])
    """

    engine = "vllm"

    episode_timeout: float = option(
        600.0, "seconds that an agent may last; longer ones fail", above=0, agree=False
    )
    least: int = option(
        0, "agents of a group that must not fail, for the group to be trained; 0: all", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.group_size:
            raise ConfigError("--least must be at most --group-size.")
        if self.engine != "vllm":
            raise ConfigError("--engine must be vllm: agents need its chat template and parsers.")
        for name, given in {
            "--overlong-cache": self.overlong_cache,
            "--beta": self.beta,
            "--reward-above and --reward-below": self.drops_groups,
            "held_out()": type(self).held_out is not Recipe.held_out,
        }.items():
            if given:
                raise ConfigError(f"leave {name} out: makers of agents cannot do this.")
        if not inspect.iscoroutinefunction(self.agent):
            raise ConfigError("agent must be: async def agent(self, prompt, session).")

    @classmethod
    def missing(cls) -> list[str]:
        """Return the names of methods that this class must have and lacks."""
        return sorted(cls.__abstractmethods__)  # agents return their rewards

    @abstractmethod
    async def agent(self, prompt: dict[str, Any], session: AgentSession) -> float:
        """Return the reward of one agent, a finite number.

        An agent that raises, or lasts longer than `episode_timeout`, costs its session, and with
        fewer than `least` others its group; the log says why. Agents share an event loop: await
        what takes long.

        Args:
            prompt: The keys of the prompt.
            session: `await session.chat(messages, tools=...)` samples a message; `session.url` is
                the base URL for any client of OpenAI's protocol.
        """

    def maker(self, client: Client, write: Write) -> AgentRecipeMaker:
        """Return a maker that runs agents."""
        from redrb.recipe.agent_maker import AgentRecipeMaker

        return AgentRecipeMaker(client, self, write)

    def evaluate(self, models: dict[str, nn.Module]) -> None:
        """Return None: only the rewards of the trained samples are known."""
