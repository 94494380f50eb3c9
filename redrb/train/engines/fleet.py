"""`Fleet`: brings several inference servers to each published version, a few at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from redrb.connection import Client
from redrb.connection.outage import Outage
from redrb.connection.retries import insist_async
from redrb.errors import (
    ConfigError,
    DecodeError,
    EngineError,
    RedrbError,
    StoreError,
    WeightTimeout,
)
from redrb.train.engines.engine import Engine, WeightsKeptError, WeightsUnreachableError
from redrb.train.engines.weights import EngineWeights
from redrb.weights import WeightVersion
from redrb.weights.reading.catalogue import Catalogue
from redrb.weights.reading.missing import MissingWeights

LOOK_S = 1.0
"""Pause between two looks at a server, and longest wait for a version."""

AGAIN_S = 3.0
"""Pause before a server that has failed is tried again, unless a version is published."""

SLOT_S = 30.0
"""Least seconds after which a server that still loads keeps no other one waiting."""

_log = logging.getLogger("redrb")


@dataclass(eq=False, slots=True)
class _Server:
    """One server, and what is known of it.

    Attributes:
        failing: Logs why it cannot be updated.
        is_here: Whether it answers; None: it has not been asked.
        label: The label of its weights.
        since: When this label was seen first.
        settled: The version and the label for which nothing is left to be done.
    """

    engine: Engine
    weights: EngineWeights
    failing: Outage
    is_here: bool | None = None
    label: str = ""
    since: float = 0.0
    settled: tuple[WeightVersion | None, str] | None = None


class Fleet:
    """Brings each of several servers to the newest published version, for as long as it runs.

    A server that was away or started again gets the newest version once it answers, unless it has
    refused that one before. A slow one misses versions, and gets the newest. One wait at Redis
    learns of versions for all servers. Servers do not tell that they were started again, so each is
    asked for the label of its weights every `LOOK_S`.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        servers: Sequence[tuple[Engine, EngineWeights]],
        *,
        namespace: str = "default",
        at_once: int = 1,
    ) -> None:
        """Make it; nothing is sent before `run`.

        Args:
            client: From `redrb.connect`.
            name: Name of the weights: that of the trainer.
            servers: Engines with `retry_s=0`, since a fleet looks again by itself; each with the
                weights that drive it.
            namespace: Namespace of the trainer.
            at_once: Most servers that load at the same time, but for those that take long.
        """
        self._catalogue = Catalogue(client, name, namespace)
        self._missing = MissingWeights(client, namespace, name)
        self._servers = [
            _Server(engine, weights, Outage(f"{engine.where} does not get the newest weights"))
            for engine, weights in servers
        ]
        self._slots, self._slot_s = asyncio.Semaphore(at_once), SLOT_S
        self._newest: WeightVersion | None = None
        self._published = 0.0  # when the newest version was seen
        self._changed = asyncio.Event()
        self._refusing: set[_Server] = set()  # they cannot be updated as they were started

    async def run(self) -> None:
        """Update the servers until the task is cancelled; a pause is then taken back.

        Raises:
            ConfigError: No server can be updated as it was started.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for server in self._servers:
                    tasks.create_task(self._serve(server))
                tasks.create_task(self._watch())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for server in self._servers:
                await server.engine.close()
                server.weights.close()

    async def _watch(self) -> None:
        """Learn of each version."""
        outage = Outage("new versions are not seen")
        while True:
            await insist_async(
                self._wait,
                outage.failed,
                passes=lambda error: isinstance(error, (StoreError, DecodeError)),
            )
            outage.over()

    async def _wait(self) -> None:
        have = self._newest.version if self._newest else 0
        found = await asyncio.to_thread(self._catalogue.wait_once, have, LOOK_S)
        if found is not None and found != self._newest:
            self._newest = self._catalogue.used = found
            self._published = time.monotonic()
            self._changed.set()
            self._changed = asyncio.Event()
        elif self._newest is None:
            await asyncio.to_thread(self._missing.log)

    async def _serve(self, server: _Server) -> None:
        """Look at one server again and again, and update it when it lacks the newest version."""
        while True:
            changed, pause_s = self._changed, LOOK_S
            try:
                if await self._answers(server):
                    if (self._newest, server.label) != server.settled:
                        await self._settle(server)
                    server.failing.over()
                    self._refusing.discard(server)
            except (RedrbError, OSError) as error:
                if isinstance(error, ConfigError):
                    self._refusing.add(server)
                    if len(self._refusing) == len(self._servers):
                        raise
                server.failing.failed(error)
                pause_s = AGAIN_S
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await changed.wait()

    async def _answers(self, server: _Server) -> bool:
        """Ask a server for its label, and log that it comes or goes away."""
        where, was_here = server.engine.where, server.is_here
        try:
            await self._look(server)
        except EngineError as error:
            if was_here is not False:
                _log.warning("%s is away: %s", where, error)
            server.is_here = False
            return False
        if not was_here:
            come = "has come" if server.settled is None else "is back"
            _log.info("%s %s, with the weights %r", where, come, server.label)
        server.is_here = True
        return True

    async def _look(self, server: _Server) -> None:
        label = await server.engine.look()
        if label != server.label:
            server.label, server.since = label, time.monotonic()

    async def _settle(self, server: _Server) -> None:
        """Give a server the newest version, or none that is damaged."""
        if self._newest is None:
            await server.weights.introduce()
            server.settled = None, server.label
            return
        async with self._slot(server.engine.where):
            newest = self._newest
            began = max(self._published, server.since)
            try:
                version = await server.weights.update(timeout=0)
                after_s = time.monotonic() - began
                _log.info("%s has version %d after %.1f s", server.engine.where, version, after_s)
            except WeightTimeout:
                pass  # it has that version, or its damage was logged
            except WeightsUnreachableError:
                raise
            except WeightsKeptError as error:
                _log.warning("%s The server goes on with what it has.", error)
            await self._look(server)
        server.settled = newest, server.label

    @asynccontextmanager
    async def _slot(self, where: str) -> AsyncIterator[None]:
        """Wait until fewer servers load than may at once, but not for those that take long."""
        await self._slots.acquire()
        began = time.monotonic()
        with ExitStack() as slot:
            slot.callback(self._slots.release)
            loop = asyncio.get_running_loop()
            late = loop.call_later(self._slot_s, self._pass_on, where, slot)
            try:
                yield
            finally:
                late.cancel()
            self._slot_s = max(SLOT_S, 2 * (time.monotonic() - began))

    def _pass_on(self, where: str, slot: ExitStack) -> None:
        _log.warning("%s still loads after %.0f s: others go on", where, self._slot_s)
        slot.close()
