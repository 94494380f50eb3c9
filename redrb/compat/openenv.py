"""OpenEnv on streams: an episode of an environment with a gateway's model is a sample of a task.

    async with GatewayClient("http://localhost:8123") as gateway:
        async with EchoEnv(base_url="http://localhost:8000") as env:
            await play(
                gateway, env, prompt="17", group_size=8,
                show=lambda seen: seen.echoed_message,
                act=lambda message: EchoAction(message=message["content"]),
            )

The environment is a connected client of openenv-core 0.3 or newer, or anything with its `reset`
and `step`: docs/how-to/agents.md. Each episode needs a client of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from redrb.experience.fields import Scalar
from redrb.gateway.client import GatewayClient
from redrb.stream.assembly.calls import OnIncomplete

__all__ = ["play"]


async def play(
    gateway: GatewayClient,
    env: Any,
    *,
    prompt: str,
    show: Callable[[Any], str | list[dict[str, Any]]],
    act: Callable[[dict[str, Any]], Any],
    group_size: int = 1,
    max_steps: int = 100,
    reset: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    tags: Mapping[str, Scalar] | None = None,
    least: int | None = None,
    on_incomplete: OnIncomplete = "drop",
) -> float:
    """Play one episode, as one session, until the environment is done or `max_steps` are over.

    The model sees the first observation and, after each of its messages, the next one. Its reward
    is the sum of those of the steps. An episode that raises becomes no sample, and its group
    follows `least`.

    Args:
        env: A connected client, such as `GenericEnvClient`.
        prompt: Id of the prompt; `group_size` episodes of it are a group. They must begin alike:
            give them one `seed` in `reset`.
        show: Returns what the model sees of an observation: the text of a message of the user, or
            messages, such as one of the system and one of the user, or the result of a tool.
        act: Returns the action that a message of the model means.
        max_steps: Most steps, >= 1.
        reset: Arguments of the environment's `reset`, such as `seed`.
        sampling: Further fields of a request, such as `tools` and `max_tokens`.
        tags, least, on_incomplete: As in `GatewayClient.session`.

    Returns:
        The reward.

    Raises:
        EngineError: The gateway refused a request, or was away for too long.
        Exception: What the environment, `show` or `act` raises; the session is dropped.
    """
    async with gateway.session(
        prompt, group_size=group_size, tags=tags, least=least, on_incomplete=on_incomplete
    ) as session:
        found = await env.reset(**(reset or {}))
        messages: list[dict[str, Any]] = []
        reward, steps = 0.0, 0
        while not found.done and steps < max_steps:
            seen = show(found.observation)
            messages += [{"role": "user", "content": seen}] if isinstance(seen, str) else seen
            messages.append(await session.chat(messages, **(sampling or {})))
            found = await env.step(act(messages[-1]))
            reward += found.reward or 0.0
            steps += 1
        await session.reward(reward, extras={"steps": steps})
    return reward
