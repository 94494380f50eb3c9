"""OpenAI's Agents SDK on streams: a run by a gateway is a sample of a task.

    async with GatewayClient("http://localhost:8123") as gateway:
        group = (run_agent(gateway, agent, question, reward, prompt="17", group_size=8)
                 for _ in range(8))
        await asyncio.gather(*group)

Needs openai-agents 0.24 or newer: docs/how-to/agents.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from importlib import import_module
from inspect import isawaitable
from typing import Any

from redrb.experience.fields import Scalar
from redrb.gateway.client import TURN_S, GatewayClient
from redrb.stream.assembly.calls import OnIncomplete

__all__ = ["run_agent"]

_RETRIES = 10
"""Repetitions of a turn by the client of OpenAI, with pauses of up to 8 s: about a minute."""


async def run_agent(
    gateway: GatewayClient,
    agent: Any,
    input: Any,  # noqa: A002 (the SDK's name)
    reward: Callable[[Any], float | Awaitable[float]],
    *,
    prompt: str,
    group_size: int = 1,
    tags: Mapping[str, Scalar] | None = None,
    least: int | None = None,
    on_incomplete: OnIncomplete = "drop",
    run_config: Any = None,
    **options: Any,
) -> Any:
    """Run an agent by the gateway's model, as one session; return the SDK's `RunResult`.

    All agents of the run are sampled by the gateway, whatever their `model` says: those that it
    hands over to, too, and each has the run's reward. A run that raises becomes no sample, and its
    group follows `least`. Nothing is sent to OpenAI, traces neither.

    Args:
        agent: An `Agent` of the SDK.
        input: As in `Runner.run`.
        reward: Returns the reward of a `RunResult`, or a coroutine that does.
        prompt: Id of the prompt; `group_size` runs of it are a group.
        tags, least, on_incomplete: As in `GatewayClient.session`.
        run_config: A `RunConfig`; its model, provider and tracing are replaced.
        options: Further arguments of `Runner.run`, such as `max_turns` and `context`.

    Raises:
        EngineError: The gateway refused the session or the reward, or was away for too long.
        Exception: What the run or `reward` raises; the session is dropped.
    """
    agents, openai = import_module("agents"), import_module("openai")
    async with (
        gateway.session(
            prompt, group_size=group_size, tags=tags, least=least, on_incomplete=on_incomplete
        ) as session,
        openai.AsyncOpenAI(
            base_url=session.url, api_key="any", timeout=TURN_S, max_retries=_RETRIES
        ) as client,
    ):
        config = replace(
            run_config or agents.RunConfig(),
            model=await gateway.model(session.url),
            model_provider=agents.OpenAIProvider(openai_client=client, use_responses=False),
            tracing_disabled=True,
        )
        result = await agents.Runner.run(agent, input, run_config=config, **options)
        found = reward(result)
        await session.reward(await found if isawaitable(found) else found)
    return result
