"""`ReplayBuffer`: tags and their conditions, and puts that wait for room."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from redrb import ConfigError, Status, StoreFull
from redrb.compat.xtuner import ReplayBuffer
from redrb.connection import Client


def rollout(number: int) -> dict[str, Any]:
    return {"rollout_id": number, "prompt_ids": [1], "response_ids": [2]}


def ids(groups: list[list[Any]]) -> list[int]:
    return [each["rollout_id"] for group in groups for each in group]


@pytest.fixture
def play(client: Client, namespace: str) -> Callable[..., None]:
    def run(scenario: Callable[[ReplayBuffer], Awaitable[None]], **options: Any) -> None:
        async def main() -> None:
            async with ReplayBuffer(client, namespace=namespace, **options) as buffer:
                await asyncio.wait_for(scenario(buffer), 30)

        asyncio.run(main())

    return run


def test_tags_filter_as_in_storage_indices(
    play: Any, client: Client, namespace: str, tmp_path: Any
) -> None:
    async def scenario(buffer: ReplayBuffer) -> None:
        for number in range(6):
            source = "gsm8k" if number % 2 else "aime"
            await buffer.put([rollout(number)], "task", source=source, scores=number / 10)
        await buffer.put([rollout(6)], "task")
        completed = Status.COMPLETED
        assert await buffer.count("task", completed) == 7
        assert await buffer.count("task", completed, source="aime") == 3
        assert await buffer.count("task", completed, scores_gt=0.2, source_ne="aime") == 2
        either: dict[str, Any] = {"$or": [{"scores": {"$lt": 0.1}}, {"source": {"$in": ["gsm8k"]}}]}
        assert await buffer.count("task", completed, **either) == 4
        assert ids(await buffer.get(9, "task", completed, scores_gt=0.2)) == [3, 4, 5]
        assert ids(await buffer.get(1, "task", completed, source="gsm8k", scores_lte=0.2)) == [1]
        await buffer.save(tmp_path)
        assert ids(await buffer.get(9, "task", completed)) == [0, 2, 6]
        await buffer.resume(tmp_path)
        async with ReplayBuffer(client, namespace=namespace) as other:  # has not declared them
            assert ids(await other.get(9, "task", completed, source="aime")) == [0, 2]
        for wrong in (
            buffer.put([rollout(7)], "task", sorce="aime"),
            buffer.get(1, "task", completed, sorce="aime"),
            buffer.count("task", completed, sorce_gt=1),
        ):
            with pytest.raises(ConfigError, match="source"):
                await wrong

    play(scenario, tags=["source", "scores"])


def test_puts_wait_for_room_without_blocking_the_event_loop(play: Any) -> None:
    async def scenario(buffer: ReplayBuffer) -> None:
        await buffer.put([rollout(0)], "task")
        await buffer.put([rollout(1)], "task")
        waiting = [asyncio.create_task(buffer.put([rollout(n)], "task")) for n in range(2, 12)]
        await buffer.put([rollout(0)], "other")  # they occupy none of the buffer's threads
        assert await buffer.count("task", "completed") == 2
        assert not any(task.done() for task in waiting)
        got: list[int] = []
        while len(got) < 12:
            got += ids(await buffer.get(2, "task", "completed"))
        assert got == list(range(12))
        await asyncio.gather(*waiting)

    play(scenario, limit=2)


@pytest.mark.long
def test_a_put_that_waits_for_room_can_be_cancelled(play: Any) -> None:
    async def scenario(buffer: ReplayBuffer) -> None:
        await buffer.put([rollout(0)], "task")
        first, second, third = (
            asyncio.create_task(buffer.put([rollout(n)], "task")) for n in (1, 2, 3)
        )
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(first), 0.1)
        first.cancel()
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert not third.done()
        while not buffer._putting["task"]._pool._work_queue.empty():  # until the third one waits
            await asyncio.sleep(0.01)
        assert ids(await buffer.get(1, "task", "completed")) == [0]
        await third
        assert ids(await buffer.get(9, "task", "completed")) == [3]
        await buffer.put([rollout(4)], "task")
        last = asyncio.create_task(buffer.put([rollout(5)], "task"))
        await asyncio.sleep(0)
        await buffer.close()
        with pytest.raises(StoreFull):
            await last
        with pytest.raises(ConfigError, match="closed"):
            await buffer.put([rollout(6)], "task")

    play(scenario, limit=1)
