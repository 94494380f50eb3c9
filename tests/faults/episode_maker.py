"""A maker of episodes as a process, to be killed."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import redrb
from redrb import BufferItem, ExperienceStream
from redrb.train.engines import Engine, SGLangEngine, Trajectory
from redrb.train.episodes import EpisodeMaker

LEASE_MS = 2000
GROUPS, GROUP_SIZE, LENGTH = 4, 2, 6


def opened(url: str, namespace: str) -> ExperienceStream:
    settings: dict[str, Any] = {"max_staleness": 1, "groups_per_version": 6}
    client = redrb.connect(url)
    return ExperienceStream(client, "math", namespace=namespace, lease_ms=LEASE_MS, **settings)


def prompts(first: int, count: int | None = None) -> Iterator[dict[str, Any]]:
    numbers = itertools.count(first) if count is None else range(first, first + count)
    return ({"input_ids": [1, 2], "number": number} for number in numbers)


async def episode(prompt: Any, engine: Engine, partial: BufferItem | None = None) -> BufferItem:
    trajectory = Trajectory(prompt["input_ids"], partial)
    left = LENGTH - len(trajectory.actions)
    trajectory.sampled(await engine.generate(trajectory.tokens, max_new_tokens=left))
    reward = None if trajectory.aborted else 1.0
    return trajectory.item(reward=reward, extras={"number": prompt["number"]})


async def never_goes_on(
    prompt: Any, engine: Engine, partial: BufferItem | None = None
) -> BufferItem:
    if partial is not None:
        await asyncio.Event().wait()
    return await episode(prompt, engine)


def engine_of(server: str) -> Engine:
    engine = SGLangEngine(server)
    engine.version = 0
    return engine


if __name__ == "__main__":
    url, namespace, server = sys.argv[1:]
    EpisodeMaker(
        opened(url, namespace),
        never_goes_on,
        engine_of(server),
        group_size=GROUP_SIZE,
        groups=GROUPS,
    ).run(prompts(0))
