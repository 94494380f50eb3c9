"""`Engine`: an inference server that samples completions, also while its weights change."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, TypeVar, get_args

from redrb.checks import checked_number
from redrb.engines.http import JsonClient
from redrb.errors import EngineError

Finish: TypeAlias = Literal["stop", "length", "abort"]
"""Why sampling ended: at a stop token, at the limit of length, or because it was aborted."""

QUIET_S = 1.0
"""Seconds without a reply after which a paused server is taken to have no aborted request left."""

RETRY_S = 600.0
"""Seconds for which a server may be away, as while it is started again and loads its model."""

_RESUME_S = 2.0
"""Seconds for which a pause is taken back, also while the maker ends."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
"""Pauses between two requests to a server that is away."""

_ROUNDING = 1e-4
"""What rounding may add to a log-probability of 0."""

_log = logging.getLogger("redrb")

T = TypeVar("T")


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
    """The reply to one request of an engine, as the server sent it.

    Attributes:
        tokens: Token ids.
        log_probs: Log-probability of each.
        finish: Why the server ended it.
        label: The label of the server's weights after it was sampled; None: not asked for.
    """

    tokens: list[Any]
    log_probs: list[Any]
    finish: Any
    label: str | None = None


class Engine(ABC):
    """An inference server, used by one maker process with any number of requests in flight.

    When its weights change, requests in flight are aborted, return what they have, and go on from
    there with the new weights. Weights change only while no request is in flight, so
    `Generation.versions` tell exactly which weights computed a token.

    An update gives the server's weights a label. A server that was started again, or got weights
    from somebody else, has another one: what it samples is thrown away until it has loaded weights
    again. While a server is away, requests are repeated: sampling changes nothing on it.

    Attributes:
        version: Weight version that the server has; None: not known, as before the first update.
    """

    def __init__(self, client: JsonClient, *, retry_s: float) -> None:
        """Make an engine; nothing is sent.

        Args:
            client: Reaches the server.
            retry_s: Seconds for which the server may be away, or without weights.
        """
        self.version: int | None = None
        self._client = client
        self._retry_s = checked_number("retry_s", retry_s)
        self._open = asyncio.Event()  # requests may be sent
        self._open.set()
        self._updating = asyncio.Lock()
        self._ended = asyncio.Event()
        self._label: str | None = None
        self._lost = False
        self._away_since: float | None = None
        self._in_flight: set[asyncio.Task[Part]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def has_lost_weights(self) -> bool:
        """Whether the server has other weights than those of the last update."""
        return self._lost

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
            EngineError: The server refused the request, answered something else than a completion,
                or was away, or without weights, for `retry_s`.
        """
        done = Generation()

        async def request() -> Part | None:
            if not self._open.is_set():  # an update has begun since the last attempt
                return None
            return await self._sampled(
                [*tokens, *done.tokens],
                max_new_tokens=max_new_tokens - len(done.tokens),
                temperature=temperature,
                stop_token_ids=list(stop_token_ids),
                **sampling,
            )

        while await self._may_sample():
            version, label = self.version, self._label
            try:
                part = await self._repeated(request, self._retry_s, ended=self._ended)
            except EngineError:
                if self._ended.is_set():
                    break
                raise
            if part is None:
                continue
            if label is not None and part.label != label:
                self._lose_weights(label, part.label)
                continue
            done.tokens += part.tokens
            done.log_probs += part.log_probs
            done.versions += [-1 if version is None else version] * len(part.tokens)
            done.finish = part.finish
            if part.finish == "abort" and len(done.tokens) >= max_new_tokens:
                done.finish = "length"
            if done.finish != "abort":
                break
        return done

    async def update(self, path: Path, version: int, label: str | None = None) -> None:
        """Load weights from a folder that the server can read.

        Args:
            path: The folder.
            version: Number of the weights.
            label: Identifies them; by default the version does.

        Raises:
            EngineError: The server could not load them. Requests then wait for an update that
                succeeds.
        """
        label = str(version) if label is None else label
        async with self._updating:
            self._open.clear()
            try:
                async with self._paused():
                    self.version, self._lost = None, True
                    await self._repeated(lambda: self._give(path, label), self._retry_s)
                self.version, self._label, self._lost = version, label, False
            finally:
                if not self._lost:
                    self._open.set()

    async def abort(self) -> None:
        """End all requests in flight, and all later ones at once, with what they have."""
        self._ended.set()
        async with self._updating, self._paused():
            pass

    async def close(self) -> None:
        """Close the connections to the server."""
        await self._client.close()

    async def _may_sample(self) -> bool:
        """Wait until requests may be sent; False after `abort`."""
        while not self._ended.is_set() and not self._open.is_set():
            waits = [asyncio.ensure_future(each.wait()) for each in (self._open, self._ended)]
            try:
                done, _ = await asyncio.wait(
                    waits, timeout=self._retry_s, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                for each in waits:
                    each.cancel()
            if not done and not self._updating.locked():
                raise EngineError(
                    f"{self._client.where} has lost its weights, and nobody has given it new ones "
                    f"for {self._retry_s:g} s: does a trainer publish, and does `EngineWeights` "
                    "follow it?",
                    where=self._client.where,
                )
        return not self._ended.is_set()

    def _lose_weights(self, expected: str, found: str | None) -> None:
        """Note that the server has other weights: requests wait for the next update."""
        if not self._lost:
            _log.warning(
                "%s has the weights %r and not %r: it was started again, or updated by somebody "
                "else. What it has sampled is thrown away until it has the right ones",
                *(self._client.where, found, expected),
            )
            self._open.clear()
            self.version, self._lost = None, True

    async def _sampled(
        self, tokens: list[int], *, max_new_tokens: int, **sampling: Any
    ) -> Part | None:
        """Return the checked reply to a request; None if the request was given up.

        Raises:
            EngineError: The server was away, refused the request, or has not answered by a
                completion.
        """
        request = self._request(tokens, max_new_tokens=max_new_tokens, **sampling)
        part = await self._reply(request)
        if part is None:
            return None
        if part.finish not in get_args(Finish):  # such as "error", or null
            raise EngineError(
                f"{self._client.where} broke a completion off: its finish reason is "
                f"{part.finish!r:.80}.",
                where=self._client.where,
            )
        self._check(part, max_new_tokens)
        is_ours = self._ended.is_set() or not self._open.is_set()
        if part.finish == "abort" and not part.tokens and not is_ours:
            raise EngineError(
                f"{self._client.where} aborts requests: somebody else pauses it.",
                where=self._client.where,
            )
        return part

    def _check(self, part: Part, most: int) -> None:
        """Raise if a reply is no completion of at most `most` tokens."""
        count = len(part.tokens)
        if count != len(part.log_probs):
            raise self._malformed("a log-probability for each token")
        if count > most or (not count and most and part.finish == "length"):
            raise self._malformed(f"at most {most} tokens, and at least one: they were {count}")
        if not all(type(token) is int and token >= 0 for token in part.tokens):
            raise self._malformed("token ids, which are whole numbers from 0 on")
        if not all(
            isinstance(each, int | float) and -math.inf < each <= _ROUNDING
            for each in part.log_probs
        ):
            raise self._malformed("log-probabilities, which are numbers up to 0")

    async def _repeated(
        self,
        request: Callable[[], Awaitable[T]],
        seconds: float,
        *,
        ended: asyncio.Event | None = None,
    ) -> T:
        """Send a request that may be done twice, again while the server is away.

        Args:
            request: Sends it.
            seconds: Time for which the server may be away, since it has answered last.
            ended: Nothing is repeated after this event.
        """
        for number in itertools.count():
            try:
                result = await request()
            except EngineError as error:
                if not error.is_outage:
                    self._away_since = None
                    raise
                now = time.monotonic()
                if self._away_since is None:
                    self._away_since = now
                    _log.warning("an inference server is away: %s", error)
                if now - self._away_since >= seconds or (ended is not None and ended.is_set()):
                    raise
                pause = min(_SHORTEST_PAUSE_S * 2 ** min(number, 10), _LONGEST_PAUSE_S)
                with suppress(TimeoutError):
                    await asyncio.wait_for((ended or asyncio.Event()).wait(), pause)
            else:
                if self._away_since is not None:
                    away_s = time.monotonic() - self._away_since
                    self._away_since = None
                    _log.warning("%s answers again, after %.1f s", self._client.where, away_s)
                return result
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Pause the server, and resume it, also if the pause was cancelled or its reply is lost."""
        try:
            await self._repeated(self._pause, self._retry_s)
            await self._drain()
            yield
        except BaseException:
            with suppress(EngineError):
                await self._take_back_pause()
            raise
        await self._take_back_pause()

    async def _take_back_pause(self) -> None:
        try:
            await asyncio.wait_for(self._repeated(self._resume, _RESUME_S), 2 * _RESUME_S)
        except TimeoutError as error:
            raise EngineError(
                f"{self._client.where} does not answer, and may still be paused.",
                where=self._client.where,
            ) from error

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
        """Send one request and return its reply, with the label if weights were loaded."""

    @abstractmethod
    async def _pause(self) -> None:
        """Abort the requests in flight, which return what they have, and take no new ones."""

    async def _give(self, path: Path, label: str) -> None:
        """Load weights, and give them their label.

        Until all are loaded the server has a label that no maker expects: if this is broken off, no
        other maker takes what is there for the weights before.
        """
        await self._name(f"loading {label}")
        await self._load(path)
        await self._name(label)

    async def _name(self, label: str) -> None:
        """Give the server's weights a label; vLLM and SGLang have the same request for it."""
        body = {"new_version": label, "abort_all_requests": False}
        await self._client.post("/update_weight_version", body)

    @abstractmethod
    async def _load(self, path: Path) -> None:
        """Load weights."""

    @abstractmethod
    async def _resume(self) -> None:
        """Take requests again."""

    def _malformed(self, what: str) -> EngineError:
        return EngineError(
            f"{self._client.where} answered without {what}.",
            where=self._client.where,
            status=200,
        )
