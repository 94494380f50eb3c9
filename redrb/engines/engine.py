"""`Engine`: an inference server that samples completions, also while its weights change."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from redrb.engines.http import JsonClient
from redrb.errors import EngineError

Finish: TypeAlias = Literal["stop", "length", "abort"]
"""Why sampling ended: at a stop token, at the limit of length, or because it was aborted."""

MOST_PARTS = 10_000
"""Most requests for one completion; more mean that the server aborts all of them."""

QUIET_S = 1.0
"""Seconds without a reply after which a paused server is taken to have no aborted request left."""


@dataclass(slots=True)
class Generation:
    """A sampled completion.

    Attributes:
        tokens: Token ids, the stop token included.
        log_probs: Log-probability of each, as the server computed it.
        versions: Weight version that computed each; -1: not known.
        finish: Why it ended.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish = "abort"


@dataclass(frozen=True, slots=True)
class Part:
    """The reply to one request of an engine.

    Attributes:
        tokens: Token ids.
        log_probs: Log-probability of each.
        finish: Why the server ended it.
    """

    tokens: list[int]
    log_probs: list[float]
    finish: Finish


class Engine(ABC):
    """An inference server, used by one maker process with any number of requests in flight.

    When its weights change, requests in flight are aborted, return what they have, and go on from
    there with the new weights. Weights change only while no request is in flight, so
    `Generation.versions` tell exactly which weights computed a token.

    Attributes:
        version: Weight version that the server has; None: not known, as before the first update.
    """

    def __init__(self, client: JsonClient) -> None:
        self.version: int | None = None
        self._client = client
        self._open = asyncio.Event()
        self._open.set()
        self._updating = asyncio.Lock()
        self._ended = False
        self._in_flight: set[asyncio.Task[Part]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self,
        tokens: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        **sampling: Any,
    ) -> Generation:
        """Sample one completion.

        Args:
            tokens: The prompt, with everything that was sampled before.
            max_new_tokens: Most tokens.
            temperature: Divides the logits.
            stop_token_ids: Tokens that end the completion, beside the model's EOS.
            sampling: Further parameters of the server, such as `top_p`.

        Returns:
            The completion; `finish` is "abort" after `abort`, and never because of an update.

        Raises:
            EngineError: The server was not reached, or refused the request.
        """
        done = Generation()
        for _ in range(MOST_PARTS):
            while not self._open.is_set():
                await self._open.wait()
            if self._ended:
                return done
            version = -1 if self.version is None else self.version
            part = await self._reply(
                self._request(
                    [*tokens, *done.tokens],
                    max_new_tokens=max_new_tokens - len(done.tokens),
                    temperature=temperature,
                    stop_token_ids=list(stop_token_ids),
                    **sampling,
                )
            )
            if part is None:
                continue
            done.tokens += part.tokens
            done.log_probs += part.log_probs
            done.versions += [version] * len(part.tokens)
            done.finish = part.finish
            if part.finish == "abort" and len(done.tokens) >= max_new_tokens:
                done.finish = "length"
            if done.finish != "abort":
                return done
        raise EngineError(
            f"{self._client.where} aborted a request {MOST_PARTS} times: is it paused?",
            where=self._client.where,
        )

    async def update(self, path: Path, version: int) -> None:
        """Load weights from a folder that the server can read.

        Raises:
            EngineError: The server could not load them; its version is then not known.
        """
        async with self._updating:
            self._open.clear()
            try:
                await self._pause()
                try:
                    await self._drain()
                    self.version = None
                    await self._load(path, version)
                    self.version = version
                finally:
                    await self._resume()
            finally:
                self._open.set()

    async def abort(self) -> None:
        """End all requests in flight, and all later ones at once, with what they have."""
        async with self._updating:
            self._ended = True
            await self._pause()
            try:
                await self._drain()
            finally:
                await self._resume()

    async def close(self) -> None:
        """Close the connections to the server."""
        await self._client.close()

    async def _reply(self, request: Coroutine[Any, Any, Part]) -> Part | None:
        """Send a request and return its reply; None if `_drain` gave the request up."""
        task = asyncio.ensure_future(request)
        self._in_flight.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self._in_flight.discard(task)
            task.cancel()  # without effect after its end
        return None if task.cancelled() else task.result()

    async def _drain(self) -> None:
        """Wait until no request is in flight, after the server was paused.

        Aborted requests answer soon. One that reached the server after the pause waits there, and
        would be computed with other weights than those that are noted for it: when no reply has
        come for `QUIET_S`, it is given up, which closes its connection, and is sent again later.
        """
        waiting: set[asyncio.Task[Part]] = set(self._in_flight)
        while waiting:
            done, waiting = await asyncio.wait(
                waiting, timeout=QUIET_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                for late in waiting:
                    late.cancel()
                await asyncio.wait(waiting, timeout=QUIET_S)
                return

    @abstractmethod
    async def _request(
        self,
        tokens: list[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: list[int],
        **sampling: Any,
    ) -> Part:
        """Send one request and return its reply."""

    @abstractmethod
    async def _pause(self) -> None:
        """Abort the requests in flight, which return what they have, and take no new ones."""

    @abstractmethod
    async def _load(self, path: Path, version: int) -> None:
        """Load weights."""

    @abstractmethod
    async def _resume(self) -> None:
        """Take requests again."""

    def _malformed(self, what: str) -> EngineError:
        return EngineError(
            f"{self._client.where} answered without {what}.", where=self._client.where
        )
