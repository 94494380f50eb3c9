"""`Sink`: the task of an episode maker for coroutines, which must not block."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from redrb.connection.deadline import Deadline
from redrb.connection.stop import Stop
from redrb.errors import (
    BatchTimeout,
    SendFailed,
    StoreError,
    StoreUnavailable,
)
from redrb.experience import BufferItem
from redrb.stream import Admission, ExperienceStream, Lease
from redrb.stream.sending import ExperienceSender
from redrb.train.rights import TaskRights

_log = logging.getLogger("redrb")

T = TypeVar("T")

_THREADS = 8
"""Most calls at a time; puts are short, and one thread waits for rights."""


class Sink:
    """Takes rights and unfinished groups of a task, and puts groups, however long Redis is away.

    Attributes:
        version: Weight version of the task when it gave the newest right; None before.
    """

    def __init__(self, stream: ExperienceStream, stop: Stop, *, most_unsent: int) -> None:
        self.stream = stream
        self._stop = stop
        self.version: int | None = None
        self._given_up = Stop()
        self._rights = TaskRights(stream, stop, "a maker")
        self._sender = ExperienceSender(stream, max_groups=most_unsent, offload=False)
        self._pool = ThreadPoolExecutor(_THREADS, "redrb-episodes")

    @property
    def backpressure_s(self) -> float:
        """Seconds for which groups have waited for room among those that are not in Redis."""
        return self._sender.backpressure_s

    def give_up(self) -> None:
        """End the waits of all calls: for room, and for Redis."""
        self._given_up.ask()

    async def call(self, call: Callable[..., T], *arguments: Any) -> T:
        """Make a call that waits for Redis in a thread, until `give_up`."""

        def stopping() -> T:
            with Deadline(stop=self._given_up):
                return call(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self._pool, stopping)

    async def flush(self) -> None:
        """Wait until all groups are in Redis.

        Raises:
            SendFailed: Some could not be put.
        """
        await self.call(self._sender.flush)

    def close(self) -> None:
        """End the threads; groups that are not in Redis are given up, and a warning counts them."""
        self.give_up()
        self._pool.shutdown()
        try:
            self._sender.close(timeout=0.0)
        except SendFailed as failure:
            _log.warning("a maker ends: %s", failure)

    async def admit(self) -> Admission | None:
        """Wait for the right to begin a group; None if the task gives none, or at the end."""
        right = await self.call(self._rights.wait)
        if right is not None:
            self.version = right.version
        return right

    async def take_aborted(self) -> Lease | None:
        """Take a group of unfinished samples, if one waits."""

        def take() -> Lease | None:
            try:
                with Deadline(stop=self._stop):
                    return self.stream.take(1, status="aborted", timeout=0)
            except (BatchTimeout, StoreUnavailable):
                return None

        return await self.call(take)

    async def put(self, items: list[BufferItem], right: Admission | None) -> None:
        """Hand a group to the sender.

        Raises:
            SendFailed: Earlier groups could not be put.
        """
        self._announce(items)
        await self.call(lambda: self._sender.send(items, admission=right))

    async def put_part(
        self, key: str, items: list[BufferItem], index: int, of: int, right: Admission | None
    ) -> None:
        """Put the samples of one episode as a part of their group."""
        self._announce(items)
        used = right if right is not None and right.left else None
        await self.call(
            lambda: self.stream.put_part(key, items, index=index, of=of, admission=used)
        )

    async def filter(self) -> None:
        """Count a group that was not made as filtered."""
        try:
            await self.call(self.stream.discard_filtered, 1)
        except StoreError as error:
            _log.warning("a group that is filtered may not be counted: %s", error)

    async def cancel(self, right: Admission) -> None:
        """Return a right, unless it was used."""
        await self.call(right.cancel)

    def _announce(self, items: Sequence[BufferItem]) -> None:
        """Note what the worker's next announcement says of the newest group."""
        worker, versions = self.stream.worker, [item.policy_version for item in items]
        worker.weight_version = max((each for each in versions if each is not None), default=0)
        rewards = [float(item.reward) for item in items if item.reward is not None]
        if rewards:
            worker.metrics = {"reward": sum(rewards) / len(rewards)}
