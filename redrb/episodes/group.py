"""The samples of one prompt: its episodes, their order, what is stored of unfinished ones."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, Self, TypeAlias

import torch

from redrb.algorithms import group_relative_advantages
from redrb.errors import ConfigError, RecordError
from redrb.experience import BufferItem, Status

Episode: TypeAlias = Callable[..., Awaitable[BufferItem | Sequence[BufferItem]]]
"""`async def episode(prompt, engine)`, or `(prompt, engine, partial)`, that returns its samples."""

Finished: TypeAlias = list[BufferItem] | None
"""The samples of a group; None: the group is filtered."""

Finish: TypeAlias = Callable[[list[BufferItem]], Finished | Awaitable[Finished]]
"""Completes the samples of a group; it may be a coroutine function."""

PROMPT = "prompt"
"""Key in the extras of unfinished samples, under which their prompt is stored."""


class EpisodeEngine(Protocol):
    """What an episode maker calls of an engine; all the rest is between engine and episodes."""

    async def __aenter__(self) -> Self:
        """Begin to take requests."""

    async def __aexit__(self, *error: object) -> None:
        """End."""

    async def abort(self) -> None:
        """End all requests, also later ones, with what was sampled so far."""


class EpisodeRunner:
    """Calls the user's coroutine function, for new episodes and for unfinished ones."""

    def __init__(self, episode: Episode, engine: Any) -> None:
        """Check the function.

        Raises:
            ConfigError: It is no coroutine function.
        """
        call = getattr(episode, "__call__", None)  # noqa: B004 (the method of an object)
        if not inspect.iscoroutinefunction(episode) and not inspect.iscoroutinefunction(call):
            raise ConfigError(
                f"episode={episode!r:.80}: give a coroutine function, async def episode(prompt, "
                "engine)."
            )
        self._episode = episode
        self._engine = engine
        self._goes_on = "partial" in inspect.signature(episode).parameters

    async def run(self, prompt: Any, partial: BufferItem | None = None) -> list[BufferItem]:
        """Run one episode, from the beginning or from an unfinished sample.

        A function without the parameter `partial` begins unfinished episodes anew.

        Raises:
            RecordError: It returned no samples.
            Any error of the function.
        """
        more = {"partial": partial} if self._goes_on and partial is not None else {}
        found = await self._episode(prompt, self._engine, **more)
        items = [found] if isinstance(found, BufferItem) else list(found)
        if not items or not all(isinstance(item, BufferItem) for item in items):
            raise RecordError(f"an episode returned {found!r:.80}: return its samples.")
        for item in items:
            if item.status is Status.ABORTED:
                item.extras = {**item.extras, PROMPT: prompt}
        return items

    async def go_on(self, item: BufferItem) -> list[BufferItem]:
        """Return a finished sample as it is, and finish the others."""
        if item.status is not Status.ABORTED:
            return [item]
        return await self.run(item.extras.pop(PROMPT), item)


def with_group_advantages(items: list[BufferItem]) -> list[BufferItem]:
    """Compare each sample with its group, where samples have rewards and no advantages yet."""
    if len(items) > 1 and all(
        item.reward is not None and item.advantages is None for item in items
    ):
        rewards = torch.tensor([float(item.reward) for item in items if item.reward is not None])
        advantages = group_relative_advantages(rewards, group_size=len(items))
        for item, advantage in zip(items, advantages, strict=True):
            item.advantages = advantage
    return items


def can_go_on(item: BufferItem) -> bool:
    """Return whether a sample is finished, or holds the prompt with which its episode goes on."""
    return item.status is not Status.ABORTED or PROMPT in item.extras


def is_aborted(items: Sequence[BufferItem]) -> bool:
    """Return whether some samples are unfinished."""
    return any(item.status is Status.ABORTED for item in items)
