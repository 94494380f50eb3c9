"""`Groups`: begins groups of episodes, new ones and aborted ones, and hands them to the sink."""

from __future__ import annotations

import asyncio
import inspect
import logging
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from redrb.checks import checked_int
from redrb.connection.stop import Stop
from redrb.episodes.group import EpisodeRunner, Finish, Finished, can_go_on, is_aborted
from redrb.episodes.sink import Sink
from redrb.errors import (
    ConfigError,
    EncodeError,
    EngineError,
    LeaseLost,
    RecordError,
    RedrbError,
    StoreUnavailable,
)
from redrb.experience import BufferItem
from redrb.experience.faults import log_filtered, raised
from redrb.stream import Admission, Lease

_log = logging.getLogger("redrb")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """How groups of episodes are made.

    Attributes:
        task: Name of the task.
        size: Episodes of a group.
        finish: Completes the samples of a group.
        parts: Whether the samples of each episode are put as a part of their group.
        resumes: Whether aborted groups are taken before new ones are begun.
        keeps_aborted: Whether the task can have its aborted groups finished; if not, they are
            filtered.

    Raises:
        ConfigError: A value cannot be used, or aborted groups are to be resumed in a task that
            cannot put them back.
    """

    task: str
    size: int
    finish: Finish
    parts: bool
    resumes: bool
    keeps_aborted: bool

    def __post_init__(self) -> None:
        checked_int("group_size", self.size, 1)
        if self.resumes and not self.keeps_aborted:
            raise ConfigError(
                f"task {self.task!r} has the order 'admission', in which unfinished groups "
                "cannot be put back: give resume=False."
            )


class Groups:
    """The groups of an episode maker, each a coroutine that ends when the group is handed over."""

    def __init__(
        self, runner: EpisodeRunner, sink: Sink, stop: Stop, options: GroupOptions
    ) -> None:
        """Make it.

        Args:
            runner: Runs episodes.
            sink: Gets the groups.
            stop: After it was asked, no group begins.
            options: How groups are made.
        """
        self._runner, self._sink, self._stop, self._options = runner, sink, stop, options
        self._resumes = options.resumes

    async def next(self, prompts: Iterator[Any]) -> Any:
        """Return the coroutine of the next group; None if there is none."""
        if self._resumes:
            lease = await self._sink.take_aborted()
            if lease is not None and self._stop:
                await self._sink.release(lease)
                return None
            if lease is not None:
                return self._go_on(lease)
        prompt = next(prompts, self)
        if prompt is self:
            return None
        right = await self._sink.admit()
        if self._stop:
            await self._sink.cancel(right)
            return None
        return self._group(prompt, right)

    async def _group(self, prompt: Any, right: Admission | None) -> None:
        """Run all episodes of a new group, and put it."""
        key = uuid.uuid4().hex
        try:
            made = await self._together(
                [self._episode(prompt, key, index, right) for index in range(self._options.size)]
            )
            if not self._options.parts:
                items = None if made is None else await self._finished(made)
                if items is None:
                    await self._sink.filter()
                else:
                    await self._sink.put(items, right)
        finally:
            await asyncio.shield(self._sink.cancel(right))

    async def _episode(
        self, prompt: Any, key: str, index: int, right: Admission | None
    ) -> list[BufferItem]:
        items = await self._runner.run(prompt)
        if self._options.parts and not is_aborted(items):
            await self._sink.put_part(key, items, index, self._options.size, right)
        return items

    async def _go_on(self, lease: Lease) -> None:
        """Finish the episodes of a group of unfinished samples, and put it in its place."""
        try:
            [group] = lease.groups()
            if not all(map(can_go_on, group)):
                self._resumes = False
                _log.warning(
                    "task %r has an unfinished group of another kind of maker: this maker finishes "
                    "no groups from now on",
                    self._options.task,
                )
                await self._sink.release(lease)
                return
            made = await self._together([self._runner.go_on(item) for item in group])
            await self._sink.forward(lease, None if made is None else await self._finished(made))
        except (LeaseLost, StoreUnavailable) as error:  # the group waits again, as it was
            _log.warning("a maker goes on: %s", error)
        except (RecordError, EncodeError) as error:  # counts as a failed delivery
            _log.warning("a group that was finished cannot be put: %r", error)
            await self._sink.fail(lease, error)
        except BaseException:
            with suppress(RedrbError):
                await asyncio.shield(self._sink.release(lease))
            raise

    async def _together(self, calls: list[Any]) -> list[BufferItem] | None:
        """Run the episodes of a group; None if one of them raised, which is logged."""
        results = await asyncio.gather(*calls, return_exceptions=True)
        items: list[BufferItem] = []
        for result in results:
            if isinstance(result, EngineError) and not result.is_refusal:
                raise result
            if isinstance(result, Exception):
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
            return items if self._options.keeps_aborted else None
        try:
            found = self._options.finish(items)
            return await found if inspect.isawaitable(found) else found
        except Exception as error:  # noqa: BLE001 (the user's function: its group is filtered)
            fault = raised("the end of a group", error)
            log_filtered(
                fault, "a group is filtered: its samples could not be finished: %s", fault.why
            )
            return None
