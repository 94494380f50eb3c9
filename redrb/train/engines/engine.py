"""`Engine`: an inference server that samples completions, also while its weights change."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self, TypeVar, get_args
from urllib.parse import urlsplit

from tenacity import wait_exponential

from redrb.checks import checked_number
from redrb.connection.outage import Outage
from redrb.connection.retries import insist_async
from redrb.errors import ConfigError, EngineError
from redrb.train.engines.completions import Finish, Generation, Sampled, missing_in
from redrb.train.engines.http import JsonClient
from redrb.train.engines.labels import Named, of_same, weights_of
from redrb.train.engines.routing import Routing, joined, rows_of


@dataclass(frozen=True, slots=True)
class Published:
    """A version that a server fetches from Redis by itself.

    Attributes:
        where: Where the weights are: fields of `redrb.compat.vllm.transfer.RedrbInitInfo`.
        version: The version's number.
        created_s: When it was created.
        label: What names it at servers.
        base: Of an adapter, the version that it belongs to.
    """

    where: Mapping[str, Any]
    version: int
    created_s: float
    label: str
    base: Published | None = None


LOOK_S = 5.0
"""Seconds in which a server must tell the label of its weights; one step may delay it."""

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


class WeightsKeptError(EngineError):
    """A server could not load weights, and still has all of those that it had before.

    `is_damage`: what is stored is damaged, and a later version may be whole.
    """

    is_damage = False


class WeightsUnreachableError(WeightsKeptError):
    """A server could not reach Redis, and still has the weights that it had: try it again."""


class WeightsMixedError(EngineError):
    """Loading broke off: a server may have a mixture of weights, and stays paused."""


class Engine(ABC):
    """An inference server, used by one maker process with any number of requests in flight.

    Weights change only while the server samples nothing, so `Generation.versions` tell exactly
    which weights computed a token. Requests in flight are aborted for it, return what they have,
    and go on from there with the new weights; a server that tells the weights of each token may
    keep them instead.

    Each loading gives the server's weights a label that no other loading has. A token counts if its
    label is one that `EngineWeights` gives versions of these weights, whoever loaded them, or if
    the server has afterwards the label that was known before. A server that was started again, or
    got weights from another program, has another one: what it samples is thrown away until it has
    the weights again. While a server is away, requests are repeated: sampling changes nothing.

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
            ConfigError: An argument is not usable, or aiohttp is not installed.
        """
        self.version: int | None = None
        self._client = client = JsonClient(url, timeout=timeout, api_key=api_key)
        self._where = client.where + urlsplit(url).path.rstrip("/")
        self._retry_s = checked_number("retry_s", retry_s)
        self._open = asyncio.Event()  # requests may be sent
        self._open.set()
        self._updating = asyncio.Lock()
        self._ended = asyncio.Event()
        self._label: str | None = None
        self._lost = self._is_mixed = False
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
    def where(self) -> str:
        """URL of the server without user and password."""
        return self._where

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
        routed_tokens: int = 0,
        **sampling: Any,
    ) -> Generation:
        """Sample one completion.

        Args:
            tokens: The prompt, with everything that was sampled before.
            max_new_tokens: Most tokens.
            temperature: Divides the logits.
            stop_token_ids: Tokens that end the completion, beside the model's EOS.
            routed_tokens: First tokens whose routed experts need not be sent, since they are known.
            sampling: Further parameters of the server, such as `top_p`.

        Returns:
            The completion; `finish` is "abort" after `abort`, and never because of an update.

        Raises:
            EngineError: The server refused the request, answered something else than a completion,
                or was away, or without weights, for `retry_s`.
        """
        done = Generation()
        routed: Routing | None = None

        async def request() -> Sampled | None:
            if not self._open.is_set():  # an update has begun since the last attempt
                return None
            return await self._sampled(
                [*tokens, *done.tokens],
                max_new_tokens - len(done.tokens),
                routed_tokens=routed_tokens + rows_of(routed),
                temperature=temperature,
                stop_token_ids=list(stop_token_ids),
                **sampling,
            )

        while await self._may_sample():
            version, label = self.version, self._label
            try:
                part = await self.repeated(request)
            except EngineError:
                if self._ended.is_set():
                    break
                raise
            if part is None:
                continue
            versions = self._versions_of(part, version, label)
            if versions is None:
                continue
            done.tokens += part.tokens
            done.log_probs += part.log_probs
            done.versions += versions
            done.finish = part.finish
            count = len(tokens) + len(done.tokens)
            try:
                routed = joined(routed, routed_tokens, part.routed_experts, count)
            except ValueError as error:
                raise self._malformed("routed experts that go on from those before") from error
            is_whole = routed_tokens + rows_of(routed) == count - 1
            done.routed_experts = routed if is_whole else None
            if part.finish == "abort" and len(done.tokens) >= max_new_tokens:
                done.finish = "length"
            if done.finish != "abort":
                break
        return done

    async def repeated(self, request: Callable[[], Awaitable[T]]) -> T:
        """Return the reply to another request that changes nothing, repeated as sampling is.

        Raises:
            EngineError: The server refused it, or was away for `retry_s` or until `abort`.
        """
        return await self._repeated(request, self._retry_s, ended=self._ended)

    @property
    def keeps_requests(self) -> bool:
        """Whether requests in flight stay at the server while weights change."""
        return False

    async def receives(self, where: Mapping[str, Any], url: str) -> bool:  # noqa: ARG002
        """Return whether the server fetches weights from Redis by itself; if so, tell it where.

        Args:
            where: As of `Published`.
            url: URL of Redis, for a server that has none of its own.

        Raises:
            EngineError: It does, and cannot reach these weights; or it is away.
        """
        return False

    async def update(
        self,
        source: Path | Published,
        version: int,
        label: str | None = None,
        *,
        is_later: Callable[[Named], Awaitable[bool]] | None = None,
    ) -> None:
        """Load weights, unless the server has them, or later ones, already.

        Args:
            source: A folder that the server can read; or a version in Redis, for a server that
                `receives`.
            version: Number of the weights.
            label: Identifies them; by default the version does.
            is_later: Whether other weights, which another maker has loaded, are later ones.

        Raises:
            WeightsReplacedError: The server was started again, or got other weights, meanwhile.
            WeightsKeptError: It could not load them, and goes on with those that it had.
            EngineError: It could not load them. Requests then wait for an update that succeeds.
        """
        label = str(version) if label is None else label
        async with self._updating:
            self._open.clear()
            try:
                found = await self._repeated(self._weights_label, self._retry_s)
                other = of_same(found, label)
                if other is not None and is_later is not None and await is_later(other):
                    version, label = other.version, found.rpartition("/")[0]
                if weights_of(found) == label:  # another maker has loaded it
                    self._is_mixed = False
                    await self._take_back_pause()  # which may have been killed before it did so
                else:
                    async with self._paused():
                        before = self.version, self._lost
                        self.version, self._lost = None, True
                        try:
                            found = await self._give(source, label)
                        except WeightsKeptError:
                            self.version, self._lost = before
                            raise
                        except WeightsMixedError:
                            self._is_mixed = True
                            raise
                        self._is_mixed = False
                self.version, self._label, self._lost = version, found, False
            finally:
                if not self._lost:
                    self._open.set()

    async def look(self) -> str:
        """Return the label of the server's weights; `has_lost_weights` tells if it is another one.

        Raises:
            EngineError: The server does not answer within `LOOK_S`. The request is not repeated.
            ConfigError: It has no such labels.
        """
        try:
            async with asyncio.timeout(LOOK_S):  # `wait_for` may lose a cancellation
                found = await self._weights_label()
        except TimeoutError as error:
            raise self._error(f"does not answer within {LOOK_S:g} s.") from error
        except EngineError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            raise ConfigError(
                f"{error}. Give the address of the server itself, and no router's; vLLM 0.32 or "
                "newer must be started with VLLM_SERVER_DEV_MODE=1."
            ) from error
        if self._label is not None:
            self._note_label(found)
        return found

    async def abort(self) -> None:
        """End all requests in flight, and all later ones at once, with what they have."""
        self._ended.set()
        self._open.set()  # those that wait for weights end
        async with self._updating, self._paused(abort=True):
            pass

    async def close(self) -> None:
        """Close the connections to the server."""
        await self._client.close()

    async def _may_sample(self) -> bool:
        """Wait until requests may be sent; False after `abort`."""
        while not self._ended.is_set() and not self._open.is_set():
            try:
                async with asyncio.timeout(self._retry_s):
                    await self._open.wait()
            except TimeoutError as error:
                if self._updating.locked():
                    continue
                raise self._error(
                    f"has lost its weights, and nobody has given it new ones for {self._retry_s:g} "
                    "s: does a trainer publish, and does `EngineWeights` follow it?"
                ) from error
        return not self._ended.is_set()

    def _versions_of(
        self, part: Sampled, version: int | None, label: str | None
    ) -> list[int] | None:
        """Return the version of each token, None if one is not known: they do not count.

        Args:
            version, label: Those that the server had, as far as it was known, at the request.
        """
        count = len(part.tokens)
        if label is None:
            return [-1 if version is None else version] * count
        if part.labels is not None:
            found = [self._number(each) for each in part.labels]
            known = [each for each in found if each is not None]
            if len(known) == count:
                return known
            self._note_label(part.labels[-1])
            return None
        if part.label == label and version is not None:
            return [version] * count
        self._note_label(part.label)
        return None

    def _number(self, label: str) -> int | None:
        """Return the version that a label names, None if it is not one of these weights."""
        if weights_of(label) == weights_of(self._label):
            return self.version
        found = of_same(label, self._label)
        return found.version if found else None

    def _note_label(self, found: str | None) -> None:
        """Note an unexpected label: with other weights, requests wait for the next update."""
        if self._lost or found == self._label:  # the completion was begun before the last update
            return
        if weights_of(found) == weights_of(self._label):
            self._label = found  # another maker has loaded the same weights again
            return
        if of_same(found, self._label) is None:
            _log.warning(
                "%s has the weights %r and not %r: it was started again, or updated by another "
                "program",
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
        missing = missing_in(part, most)
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
                async with asyncio.timeout(longest_s):
                    await ended.wait()

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
    async def _paused(self, *, abort: bool = False) -> AsyncIterator[None]:
        """Pause the server, and resume it, also if the pause was cancelled or its reply is lost.

        Args:
            abort: Abort the requests in flight, also of a server that could keep them.
        """
        try:
            await self._repeated(lambda: self._pause(abort=abort), self._retry_s)
            if abort or not self.keeps_requests:
                await self._drain()
            yield
        except BaseException:
            with suppress(EngineError):
                await self._take_back_pause()
            raise
        await self._take_back_pause()

    async def _take_back_pause(self) -> None:
        if self._is_mixed:
            return  # nobody is to be answered by a mixture
        try:
            async with asyncio.timeout(2 * _RESUME_S):
                await self._repeated(self._resume, _RESUME_S)
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
    async def _request(
        self, tokens: list[int], most: int, *, routed_tokens: int, **sampling: Any
    ) -> Sampled:
        """Ask for at most `most` tokens; return them, with the label if weights were loaded."""

    @abstractmethod
    async def _pause(self, *, abort: bool) -> None:
        """Stop sampling, and take no new requests.

        Args:
            abort: Requests in flight return what they have; else they may stay, and go on later, if
                `keeps_requests`.
        """

    async def _give(self, source: Path | Published, label: str) -> str:
        """Load weights, and give them a label, which is returned.

        Until all are loaded the server has a label that no maker expects: if this is broken off, no
        other maker takes what is there for the weights before. If the server has not that label any
        more when they are loaded, it may have been started again, and gets no new one. The label
        before is given back only if no attempt may have changed what it names.
        """
        loading, new = f"loading {label}", f"{label}/{uuid.uuid4().hex[:8]}"
        before: str | None = None

        async def load() -> None:
            nonlocal before
            found = await self._weights_label()
            if before is None:
                before = found
            elif found not in (before, loading):  # the server was started again
                before = loading
            await self._name(loading)
            try:
                await self._load(source)
            except WeightsKeptError:
                raise
            except EngineError:
                before = loading
                raise

        async def name(label: str) -> str:
            """Name what was loaded, unless it is something else; return its label."""
            found = await self._weights_label()
            if found == loading:
                await self._name(label)
                return label
            return found

        try:
            await self._repeated(load, self._retry_s)
        except WeightsKeptError:
            await self._repeated(partial(name, before or loading), self._retry_s)
            raise
        found = await self._repeated(partial(name, new), self._retry_s)
        if weights_of(found) != label:  # else another maker has loaded the same
            if isinstance(source, Path):
                # that maker may have loaded its weights before these
                await self._repeated(partial(self._name, loading), self._retry_s)
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
    async def _load(self, source: Path | Published) -> None:
        """Load weights; `Published` ones only if the server `receives`.

        Raises:
            WeightsKeptError: It has those before, all of them.
            WeightsMixedError: It may have a mixture.
        """

    @abstractmethod
    async def _resume(self) -> None:
        """Take requests again."""

    def _error(self, text: str, status: int | None = None) -> EngineError:
        return EngineError(f"{self._client.where} {text}", where=self._client.where, status=status)

    def _malformed(self, what: str) -> EngineError:
        return self._error(f"answered without {what}.", 200)
