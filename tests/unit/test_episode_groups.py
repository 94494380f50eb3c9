"""Groups of an episode maker: an episode or an end of a group that fails costs its group alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from redrb.experience import BufferItem
from redrb.train.episodes.groups import EpisodeRunner, Groups


class Sink:
    """Notes what becomes of groups."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    async def filter(self) -> None:
        self.found.append("filtered")

    async def put(self, items: list[BufferItem], _: object) -> None:
        self.found.append(len(items))


def ended(episode: Any, finish: Any) -> list[Any]:
    """Return what becomes of a group of two, and of another one that runs beside it."""
    sink: Any = Sink()
    unused: Any = None
    groups = Groups(
        runner=EpisodeRunner(episode, None),
        sink=sink,
        stop=unused,
        size=2,
        finish=finish,
        parts=False,
        resumes=False,
        keeps_aborted=False,
    )

    async def both() -> None:
        await asyncio.gather(groups._group("bad", None), groups._group("good", None))

    asyncio.run(both())
    return sorted(sink.found, key=str)


def sample() -> BufferItem:
    return BufferItem(sequences=torch.tensor([1, 2]), action_log_probs=torch.zeros(1))


@pytest.mark.parametrize("error", [ValueError(), SystemExit(2), asyncio.CancelledError()])
def test_an_episode_that_raises_anything_costs_its_group_alone(error):
    async def episode(prompt: str, _: Any) -> BufferItem:
        if prompt == "bad":
            raise error
        return sample()

    assert ended(episode, lambda items: items) == [2, "filtered"]


@pytest.mark.parametrize("error", [ValueError(), SystemExit(2), asyncio.CancelledError()])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_end_of_a_group_that_raises_anything_costs_it_alone(is_async, error):
    async def episode(prompt: str, _: Any) -> BufferItem:
        item = sample()
        item.extras = {"prompt": prompt}
        return item

    def plain(items: list[BufferItem]) -> list[BufferItem]:
        if items[0].extras["prompt"] == "bad":
            raise error
        return items

    async def coroutine(items: list[BufferItem]) -> list[BufferItem]:
        return plain(items)

    assert ended(episode, coroutine if is_async else plain) == [2, "filtered"]


def test_a_group_that_is_cancelled_is_not_filtered():
    async def main(where: str) -> Sink:
        begun, sink = asyncio.Event(), Sink()
        unused: Any = None

        async def stands() -> None:
            begun.set()
            await asyncio.Event().wait()

        async def episode(*_: Any) -> BufferItem:
            if where == "episode":
                await stands()
            return sample()

        async def finish(items: list[BufferItem]) -> list[BufferItem]:
            await stands()
            return items

        given: Any = sink
        groups = Groups(
            runner=EpisodeRunner(episode, None),
            sink=given,
            stop=unused,
            size=2,
            finish=finish,
            parts=False,
            resumes=False,
            keeps_aborted=False,
        )
        running = asyncio.create_task(groups._group("p", None))
        await begun.wait()
        running.cancel()
        await asyncio.wait((running,))
        assert running.cancelled()
        return sink

    for where in ("episode", "finish"):
        assert asyncio.run(main(where)).found == []
