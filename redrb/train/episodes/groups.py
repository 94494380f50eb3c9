"""The groups of an episode maker: episodes of one prompt, new or aborted ones, and their order."""

from __future__ import annotations

import asyncio
import inspect
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias

import torch

from redrb.algorithms import group_relative_advantages
from redrb.algorithms.user_functions import FAILURES, failure_of
from redrb.connection.stop import Stop
from redrb.errors import (
    ConfigError,
    EncodeError,
    EngineError,
    LeaseLost,
    RecordError,
    RedrbError,
    StoreUnavailable,
)
from redrb.experience import BufferItem, Experience, Status, split_experience_batch
from redrb.experience.faults import log_filtered, raised
from redrb.stream import Admission, Lease
from redrb.train.episodes.sink import Sink

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


def samples_of(found: object, what: str) -> list[BufferItem]:
    """Return as a list what a user's function, named `what`, has returned as samples.

    Raises:
        RecordError: These are no samples, or none.
    """
    if isinstance(found, Experience):
        return split_experience_batch(found)
    items: list[Any] = list(found) if isinstance(found, Iterable) else [found]
    if not items or not all(isinstance(item, BufferItem) for item in items):
        raise RecordError(
            f"{what} returned {found!r:.80}: return its samples, each a BufferItem with a reward, "
            "such as trajectory.item(reward=...)."
        )
    return items


class EpisodeRunner:
    """Calls the user's coroutine function, for new episodes and for unfinished ones."""

    def __init__(self, episode: Episode, engine: Any) -> None:
        """Raise ConfigError if the function is no coroutine function."""
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
        try:
            found = await self._episode(prompt, self._engine, **more)
        except SystemExit as error:  # it would end the event loop
            raise failure_of(error) from error
        items = samples_of(found, "an episode")
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


def is_aborted(items: Sequence[BufferItem]) -> bool:
    """Return whether some samples are unfinished."""
    return any(item.status is Status.ABORTED for item in items)


_log = logging.getLogger("redrb")


@dataclass(kw_only=True)
class Groups:
    """The groups of an episode maker, each a coroutine that ends when the group is handed over.

    Attributes:
        parts: Whether the samples of each episode are put as a part of their group.
        resumes: Whether aborted groups are taken before new ones are begun.
        keeps_aborted: Whether the task can have aborted groups finished; else they are filtered.
        reach: Waits for the weight version of a right, from which the task counts staleness.
    """

    runner: EpisodeRunner
    sink: Sink
    stop: Stop
    size: int
    finish: Finish
    parts: bool
    resumes: bool
    keeps_aborted: bool
    reach: Callable[[int], Awaitable[None]] | None = None

    async def next(self, prompts: Iterator[Any]) -> Any:
        """Return the coroutine of the next group; None if there is none."""
        if self.resumes:
            lease = await self.sink.take_aborted()
            if lease is not None and self.stop:
                await self.sink.call(lease.release)
                return None
            if lease is not None:
                return self._go_on(lease)
        prompt = next(prompts, self)
        if prompt is self:
            return None
        right = await self.sink.admit()
        try:
            if self.reach is not None and right is not None and right.version is not None:
                await self.reach(right.version)
        except BaseException:
            await self._give_back(right)
            raise
        if self.stop:
            await self._give_back(right)
            return None
        return self._group(prompt, right)

    async def _group(self, prompt: Any, right: Admission | None) -> None:
        key = uuid.uuid4().hex
        try:
            made = await self._together(
                [self._episode(prompt, key, index, right) for index in range(self.size)]
            )
            if not self.parts:
                items = None if made is None else await self._finished(made)
                if items is None:
                    await self.sink.filter()
                else:
                    await self.sink.put(items, right)
        finally:
            await self._give_back(right)

    async def _give_back(self, right: Admission | None) -> None:
        if right is not None:
            await asyncio.shield(self.sink.cancel(right))

    async def _episode(
        self, prompt: Any, key: str, index: int, right: Admission | None
    ) -> list[BufferItem]:
        items = await self.runner.run(prompt)
        if self.parts and not is_aborted(items):
            await self.sink.put_part(key, items, index, self.size, right)
        return items

    async def _go_on(self, lease: Lease) -> None:
        """Finish the episodes of a group of unfinished samples, and put it in its place."""
        try:
            [group] = lease.groups()
            if any(is_aborted([item]) and PROMPT not in item.extras for item in group):
                self.resumes = False
                _log.warning(
                    "task %r has an unfinished group of another kind of maker: this maker finishes "
                    "no groups from now on",
                    self.sink.stream.task,
                )
                await self.sink.call(lease.release)
                return
            made = await self._together([self.runner.go_on(item) for item in group])
            items = None if made is None else await self._finished(made)
            await self.sink.call(lease.forward, self.sink.stream, [items])
        except (LeaseLost, StoreUnavailable) as error:  # the group waits again, as it was
            _log.warning("a maker goes on: %s", error)
        except (RecordError, EncodeError) as error:  # counts as a failed delivery
            _log.warning("a group that was finished cannot be put: %r", error)
            await self.sink.call(lease.fail, error)
        except BaseException:
            with suppress(RedrbError):
                await asyncio.shield(self.sink.call(lease.release))
            raise

    async def _together(self, calls: list[Any]) -> list[BufferItem] | None:
        """Run the episodes of a group; None if one of them raised, which is logged."""
        results = await asyncio.gather(*calls, return_exceptions=True)
        items: list[BufferItem] = []
        for result in results:
            if isinstance(result, EngineError) and not result.is_refusal:
                raise result
            if isinstance(result, Exception | asyncio.CancelledError):  # nobody cancels one alone
                fault = raised("an episode", result)
                log_filtered(fault, "a group is filtered: %s", fault)
                return None
            if isinstance(result, BaseException):
                raise result
            items += result
        return items

    async def _finished(self, items: list[BufferItem]) -> Finished:
        """Complete a group, except one with unfinished samples."""
        if is_aborted(items):
            return items if self.keeps_aborted else None
        try:
            found = self.finish(items)
            return await found if inspect.isawaitable(found) else found
        except (*FAILURES, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
                raise
            fault = raised("the end of a group", error)
            log_filtered(
                fault, "a group is filtered: its samples could not be finished: %s", fault.why
            )
            return None
