"""verifiers on streams: an environment's episodes by a gateway are samples of a task.

    env = vf.load_environment(config)
    async with GatewayClient("http://localhost:8123") as gateway:
        for task in env.taskset:
            group = (run_episode(gateway, env, task, group_size=8) for _ in range(8))
            async with env.serving():  # it keeps an HTTP client for each session until its end
                await asyncio.gather(*group)

Needs verifiers 0.4 or newer: docs/how-to/agents.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from math import isfinite
from typing import Any

from redrb.errors import ConfigError
from redrb.experience.fields import Scalar
from redrb.gateway.client import GatewayClient
from redrb.stream.assembly.calls import OnIncomplete

__all__ = ["run_episode"]


async def run_episode(
    gateway: GatewayClient,
    env: Any,
    task: Any,
    *,
    group_size: int = 1,
    prompt: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    tags: Mapping[str, Scalar] | None = None,
    least: int | None = None,
    on_incomplete: OnIncomplete = "drop",
) -> Any:
    """Run one episode of a task by the gateway's model, as one session.

    Its reward is that of the agent that the gateway samples; metrics go into the samples' extras.
    An episode that is not whole, such as one whose program or scoring failed, becomes no sample,
    and its group follows `least`. Nothing is run again: call it anew, which is another session.

    Args:
        env: An `Env` of verifiers, in which one agent has no client of its own, and runs once.
        task: A `Task` of its task set.
        group_size: Episodes of a group.
        prompt: Id of the prompt; default: the task's key.
        sampling: Fields of verifiers' `SamplingConfig`, such as `max_tokens`.
        tags, least, on_incomplete: As in `GatewayClient.session`.

    Returns:
        verifiers' `Episode`, with its errors; `ok` says whether it is whole.

    Raises:
        ConfigError: Several agents would be sampled by the gateway, or one several times, or it
            has no reward: a session has one reward.
        EngineError: The gateway refused the session or the reward, or was away for too long.
    """
    vf = import_module("verifiers.v1")
    sampled = [
        (name, agent)
        for name, agent in env.config
        if isinstance(agent, vf.AgentConfig) and agent.client is None
    ]
    if len(sampled) != 1:
        raise ConfigError(
            f"{[name for name, _ in sampled]} would be sampled by the gateway, and a session has "
            "the reward of one agent: give the others a client of their own (--env.NAME.client)."
        )
    [(name, agent)] = sampled
    retries = agent.retries
    if retries.max_retries or any(rule.max_retries for rule in retries.rules):
        raise ConfigError(
            f"agent {name!r} is run again after a failure, and turns of the failed run would have "
            "the other's reward: set its retries to 0, and call run_episode again instead."
        )
    async with gateway.session(
        prompt or f"{task.key:.200}",
        group_size=group_size,
        tags=tags,
        least=least,
        on_incomplete=on_incomplete,
    ) as session:
        client = vf.EvalClientConfig(base_url=session.url, api_key_var="REDRB_NO_KEY")
        context = vf.ModelContext(
            await gateway.model(session.url), client, vf.SamplingConfig(**(sampling or {}))
        )
        episode = await env.run_episode(task, context)
        if episode.ok:
            trace = _trace_of(episode, name)
            metrics = {
                key: value
                for key, value in trace.metrics.items()
                if value is not None and isfinite(value)
            }
            await session.reward(trace.reward, extras=metrics)
    return episode


def _trace_of(episode: Any, name: str) -> Any:
    """Return the one trace of an agent that has its reward, or raise ConfigError."""
    traces = [each for each in episode.traces if each.agent.name == name]
    if len(traces) != 1:
        raise ConfigError(
            f"agent {name!r} ran {len(traces)} times in an episode, and a session has one reward: "
            "use an environment in which it runs once."
        )
    rewards = traces[0].rewards
    if not rewards or None in rewards.values():
        raise ConfigError(
            f"the episode of agent {name!r} has no reward: give its task a method with @vf.reward."
        )
    return traces[0]
