"""`Engine`: an inference server that samples completions, also while its weights change."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, TypeVar, get_args

from tenacity import wait_exponential

from redrb.checks import checked_number
from redrb.connection.outage import Outage
from redrb.connection.retries import insist_async
from redrb.errors import EngineError
from redrb.train.engines.http import JsonClient

Finish: TypeAlias = Literal["stop", "length", "abort"]
"""Why sampling ended: at a stop token, at the limit of length, or because it was aborted."""

_LEAST, _ROUNDING = -3e38, 1e-4
"""The least log-probability that float32 holds, and what rounding may add to one of 0."""

_TOKENS = 2**31
"""No vocabulary has a token id as large as this."""


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
class Sampled:
    """The reply to one request of an engine, as the server sent it.

    `label` is that of the server's weights after it was sampled; None: not asked for.
    """

    tokens: list[Any]
    log_probs: list[Any]
    finish: Any
    label: str | None = None


QUIET_S = 1.0
"""Seconds without a reply after which a paused server is taken to have no aborted request left."""

RETRY_S = 600.0
"""Seconds for which a server may be away, as while it is started again and loads its model."""

_PAUSES = wait_exponential(multiplier=0.1, max=2.0)
"""Pauses between two requests to a server that is away."""

_RESUME_S = 2.0
"""Seconds for which a pause is taken back, also while the maker ends."""

_log = logging.getLogger("redrb")

T = TypeVar("T")


class WeightsReplacedError(EngineError):
    """A server has other weights than those that it was loading: look which are the newest."""


class Engine(ABC):
    """An inference server, used by one maker process with any number of requests in flight.

    When its weights change, requests in flight are aborted, return what they have, and go on from
    there with the new weights. Weights change only while no request is in flight, so
    `Generation.versions` tell exactly which weights computed a token.

    Each loading gives the server's weights a label that no other loading has. A completion counts
    if the server has afterwards the label that was known before. A server that was started again,
    or got weights from another program, has another one: what it samples is thrown away until it
    has the weights again. While a server is away, requests are repeated: sampling changes nothing.

    Attributes:
        version: Weight version that the server has; None: not known, as before the first update.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 600.0,
        retry_s: float = RETRY_S,
        api_key: str | None = None,
    ) -> None:
        """Make an engine; it connects at the first request.

        Args:
            url: Address of the server, such as "http://localhost:8000".
            timeout: Seconds for which a request may last, a whole completion included.
            retry_s: Seconds for which the server may be away, or without weights, before requests
                raise.
            api_key: Sent as a bearer token.

        Raises:
            ConfigError: An argument is not usable, or httpx is not installed.
        """
        self.version: int | None = None
        self._client = client = JsonClient(url, timeout=timeout, api_key=api_key)
        self._retry_s = checked_number("retry_s", retry_s)
        self._open = asyncio.Event()  # requests may be sent
        self._open.set()
        self._updating = asyncio.Lock()
        self._ended = asyncio.Event()
        self._label: str | None = None
        self._lost = False
        self._outage = Outage(
            f"the inference server at {client.where} does not answer as it should"
        )
        self._in_flight: set[asyncio.Task[Sampled]] = set()
        self._failing: dict[object, float] = {}  # since when, of each request that is repeated

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def has_lost_weights(self) -> bool:
        """Whether the server has other weights than those of the last update."""
        return self._lost

    @property
    def away_s(self) -> float:
        """Seconds for which requests that are under way have waited for the server; 0: none has."""
        now = time.monotonic()
        return now - min(list(self._failing.values()), default=now)  # threads of heartbeats ask

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

        async def request() -> Sampled | None:
            if not self._open.is_set():  # an update has begun since the last attempt
                return None
            return await self._sampled(
                [*tokens, *done.tokens],
                max_new_tokens - len(done.tokens),
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
                self._note_label(part.label)
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
        """Load weights from a folder that the server can read, unless it has them already.

        Args:
            path: The folder.
            version: Number of the weights.
            label: Identifies them; by default the version does.

        Raises:
            WeightsReplacedError: The server was started again, or got other weights, meanwhile.
            EngineError: The server could not load them. Requests then wait for an update that
                succeeds.
        """
        label = str(version) if label is None else label
        async with self._updating:
            self._open.clear()
            try:
                found = await self._repeated(self._weights_label, self._retry_s)
                if _weights_of(found) == label:  # another maker has loaded them
                    await self._take_back_pause()  # which may have been killed before it did so
                else:
                    async with self._paused():
                        self.version, self._lost = None, True
                        found = await self._repeated(lambda: self._give(path, label), self._retry_s)
                self.version, self._label, self._lost = version, found, False
            finally:
                if not self._lost:
                    self._open.set()

    async def abort(self) -> None:
        """End all requests in flight, and all later ones at once, with what they have."""
        self._ended.set()
        self._open.set()  # those that wait for weights end
        async with self._updating, self._paused():
            pass

    async def close(self) -> None:
        """Close the connections to the server."""
        await self._client.close()

    async def _may_sample(self) -> bool:
        """Wait until requests may be sent; False after `abort`."""
        while not self._ended.is_set() and not self._open.is_set():
            try:
                await asyncio.wait_for(self._open.wait(), self._retry_s)
            except TimeoutError as error:
                if self._updating.locked():
                    continue
                raise self._error(
                    f"has lost its weights, and nobody has given it new ones for {self._retry_s:g} "
                    "s: does a trainer publish, and does `EngineWeights` follow it?"
                ) from error
        return not self._ended.is_set()

    def _note_label(self, found: str | None) -> None:
        """Note an unexpected label: with other weights, requests wait for the next update."""
        if self._lost or found == self._label:  # the completion was begun before the last update
            return
        if _weights_of(found) == _weights_of(self._label):
            self._label = found  # another maker has loaded the same weights again
            return
        _log.warning(
            "%s has the weights %r and not %r: it was started again, or updated by another "
            "program. What it has sampled is thrown away until it has the right ones",
            self._client.where,
            found,
            self._label,
        )
        self._open.clear()
        self.version, self._lost = None, True

    async def _sampled(self, tokens: list[int], most: int, **sampling: Any) -> Sampled | None:
        """Return the checked reply to a request; None if `_drain` gave the request up."""
        task = asyncio.ensure_future(self._request(tokens, most, **sampling))
        self._in_flight.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self._in_flight.discard(task)
            task.cancel()  # without effect after its end
        if task.cancelled():
            return None
        part = task.result()
        if part.finish not in get_args(Finish):  # such as "error", or null
            raise self._error(f"broke a completion off: its finish reason is {part.finish!r:.80}.")
        missing = _missing_in(part, most)
        if missing is not None:
            raise self._malformed(missing)
        is_ours = self._ended.is_set() or not self._open.is_set()
        if part.finish == "abort" and not part.tokens and not is_ours:
            raise self._error("aborts requests: somebody else pauses it.")
        return part

    async def _repeated(
        self,
        request: Callable[[], Awaitable[T]],
        seconds: float,
        *,
        ended: asyncio.Event | None = None,
    ) -> T:
        """Send a request, again while the server is away, for `seconds` or until `ended`."""
        mine, ended = object(), ended or asyncio.Event()

        def passes(error: BaseException) -> bool:
            if not (isinstance(error, EngineError) and error.is_outage):
                return False
            self._failing.setdefault(mine, time.monotonic())
            return True

        def over() -> bool:
            return ended.is_set() or time.monotonic() - self._failing[mine] >= seconds

        async def pause(longest_s: float) -> None:
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), longest_s)

        try:
            result = await insist_async(
                request,
                self._outage.failed,
                passes=passes,
                over=over,
                pause=pause,
                pauses=_PAUSES,
            )
        finally:
            self._failing.pop(mine, None)
        self._outage.over()
        return result

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
            raise self._error("does not answer, and may still be paused.") from error

    async def _drain(self) -> None:
        """Wait until no request is in flight, after the server was paused.

        Aborted requests answer soon. One that reached the server after the pause waits there, and
        would be computed with other weights than those that are noted for it: when no reply has
        come for `QUIET_S`, it is given up, which closes its connection, and is sent again later.
        """
        waiting: set[asyncio.Task[Sampled]] = set(self._in_flight)
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
    async def _request(self, tokens: list[int], most: int, **sampling: Any) -> Sampled:
        """Ask for at most `most` tokens; return them, with the label if weights were loaded."""

    @abstractmethod
    async def _pause(self) -> None:
        """Abort the requests in flight, which return what they have, and take no new ones."""

    async def _give(self, path: Path, label: str) -> str:
        """Load weights, and give them a label, which is returned.

        Until all are loaded the server has a label that no maker expects: if this is broken off, no
        other maker takes what is there for the weights before. If the server has not that label any
        more when they are loaded, it may have been started again, and gets no new one.
        """
        loading = f"loading {label}"
        await self._name(loading)
        await self._load(path)
        found = await self._weights_label()
        if found == loading:
            found = f"{label}/{uuid.uuid4().hex[:8]}"
            await self._name(found)
        elif _weights_of(found) != label:  # else another maker has loaded the same
            raise WeightsReplacedError(
                f"{self._client.where} has the weights {found!r} after it has loaded {label!r}: it "
                "was started again, or updated by another program. Load the newest weights again.",
                where=self._client.where,
                status=200,
            )
        return found

    @abstractmethod
    async def _weights_label(self) -> str:
        """Return the label of the server's weights."""

    async def _name(self, label: str) -> None:
        """Give the server's weights a label; vLLM and SGLang have the same request for it."""
        body = {"new_version": label, "abort_all_requests": False}
        await self._client.request("/update_weight_version", body)

    @abstractmethod
    async def _load(self, path: Path) -> None:
        """Load weights."""

    @abstractmethod
    async def _resume(self) -> None:
        """Take requests again."""

    def _error(self, text: str, status: int | None = None) -> EngineError:
        return EngineError(f"{self._client.where} {text}", where=self._client.where, status=status)

    def _malformed(self, what: str) -> EngineError:
        return self._error(f"answered without {what}.", 200)


def _missing_in(part: Sampled, most: int) -> str | None:
    """Return what a reply lacks to be a completion of at most `most` tokens; None: nothing."""
    count = len(part.tokens)
    if count != len(part.log_probs):
        return "a log-probability for each token"
    if count > most or (not count and most and part.finish != "abort"):
        return f"at most {most} tokens, and at least one: they were {count}"
    if not all(type(token) is int and 0 <= token < _TOKENS for token in part.tokens):
        return "token ids, which are whole numbers from 0 on"
    if not all(
        type(each) in (int, float) and _LEAST <= each <= _ROUNDING for each in part.log_probs
    ):
        return "log-probabilities, which are numbers up to 0"
    return None


def _weights_of(label: str | None) -> str | None:
    """Return which weights a label of `_give` names; each loading of them has another label."""
    return None if label is None else label.rpartition("/")[0]
