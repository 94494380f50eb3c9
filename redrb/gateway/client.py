"""`GatewayClient`: sessions of a gateway for agents that run in this process. Needs aiohttp."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

from redrb.checks import checked_number
from redrb.connection.retries import insist_async
from redrb.errors import ConfigError, EngineError
from redrb.experience.fields import Scalar
from redrb.http_client import Http
from redrb.stream.assembly.calls import OnIncomplete

__all__ = ["AgentSession", "GatewayClient"]

TURN_S = 600.0
"""Seconds for one request: a turn of the gateway is sampled as a whole before it is answered."""

DROP_S = 10.0
"""Seconds for which the drop of a session is repeated: without it, the session expires."""

LATE_S = 1.0
"""Seconds to wait for a session whose opener was cancelled. A gateway that opens it later finds the
connection closed, and drops it."""

_PASSING = (None, 408, 429, 502, 503, 504)
"""What is sent again: no reply, a busy gateway, and a balancer whose gateway was killed."""

MOST_PAUSE_S = 60.0
"""Longest pause before a request is sent again, whatever the gateway asks for."""


class AgentSession:
    """A session of a gateway: one sample of the group of its prompt.

    Attributes:
        url: Base URL for clients of OpenAI's protocol, and the session's secret: it ends in "/v1".
            Anthropic's clients take it without that end.
        weight_version: Version of the weights that the task knew at its begin; None: none.
        is_over: Whether its reward is stored.
    """

    def __init__(self, client: GatewayClient, url: str, weight_version: int | None) -> None:
        self.url, self.weight_version, self.is_over = url, weight_version, False
        self._client = client

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """Return the message that answers a chat; the same call again returns the same one.

        Args:
            messages: The history, in the form of `/v1/chat/completions`.
            options: Further fields of the request, such as `tools` and `max_tokens`.

        Raises:
            EngineError: The gateway refused the request, or was away for too long.
        """
        body = {"model": await self._client.model(self.url), "messages": list(messages), **options}
        found = await self._client.request("POST", f"{self.url}/chat/completions", body)
        try:
            return dict(found["choices"][0]["message"])
        except (LookupError, TypeError, ValueError) as error:
            text = f"the gateway {self._client.where} answered without a message"
            raise EngineError(text, where=self._client.where, status=200) from error

    async def reward(self, reward: float, *, extras: Mapping[str, Any] | None = None) -> None:
        """End the session with its reward; it may be repeated, and the first reward holds.

        Args:
            reward: A finite number.
            extras: Values for the samples, which the trainer gets.

        Raises:
            ConfigError: The reward is no finite number.
            EngineError: The gateway refused it, or was away for too long.
        """
        body = {"reward": checked_number("reward", reward), "extras": dict(extras or {})}
        await self._client.request("POST", f"{self.url.removesuffix('/v1')}/reward", body)
        self.is_over = True

    async def drop(self) -> None:
        """Delete the session, unless it has its reward; raises EngineError."""
        await self._client.request("DELETE", self.url.removesuffix("/v1"), within_s=DROP_S)


class GatewayClient:
    """Opens sessions of a gateway, from one event loop.

    It sends again what the gateway cannot serve yet (status 503), with the pauses that it asks for,
    and after a broken connection. Nothing is begun, sampled or counted twice by that.

    Args:
        url: Address of the gateway, or of the balancer before several.
        token: The gateway's REDRB_GATEWAY_TOKEN; "": it needs none.
        wait_s: Seconds for which a request is sent again, such as the one for a session while the
            trainer is behind.

    Raises:
        ConfigError: An argument is not usable, or aiohttp is missing.
    """

    def __init__(self, url: str, *, token: str = "", wait_s: float = 3600.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url={url!r:.80}: give the address of a gateway, http://host:port.")
        self.where = url.rstrip("/")
        self._wait_s = checked_number("wait_s", wait_s)
        self._token, self._model, self._http = token, "", Http()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; sessions stay."""
        await self._http.close()

    @asynccontextmanager
    async def session(
        self,
        prompt: str,
        *,
        group_size: int = 1,
        tags: Mapping[str, Scalar] | None = None,
        least: int | None = None,
        on_incomplete: OnIncomplete = "drop",
    ) -> AsyncIterator[AgentSession]:
        """Open a session, and drop it at the end of the block if it has no reward by then.

        So an exception in the block drops it.

        Args:
            prompt: Id of the prompt; `group_size` sessions of it are a group.
            group_size: Sessions of a group.
            tags: Of the samples of the group.
            least: Fewest sessions with which the group is put; default: all.
            on_incomplete: What becomes of a group with fewer: "drop", or "dead", a dead letter.

        Raises:
            EngineError: The gateway refused the session, or had none for `wait_s`.
        """
        body = {"prompt": prompt, "group_size": group_size, "tags": dict(tags or {})}
        body |= {"least": least, "on_incomplete": on_incomplete}
        opening = asyncio.create_task(self._opened(body))
        try:
            session = await asyncio.shield(opening)
        except asyncio.CancelledError:
            await self._dropped(opening)
            raise
        try:
            yield session
        except BaseException as error:
            try:
                await session.drop()
            except EngineError as other:
                error.add_note(f"The session was not dropped, and expires: {other}")
            raise
        if not session.is_over:
            await session.drop()

    async def _opened(self, body: Mapping[str, Any]) -> AgentSession:
        found = await self.request("POST", f"{self.where}/sessions", body, key=secrets.token_hex())
        url = str(found.get("url"))
        if not url.startswith(("http://", "https://")):
            raise self._failed("answered without the URL of a session", 201)
        return AgentSession(self, url, found.get("weight_version"))

    async def _dropped(self, opening: asyncio.Task[AgentSession]) -> None:
        """Wait for the session of an opener that was cancelled, and drop it."""
        try:
            await asyncio.wait((opening,), timeout=LATE_S)
            with suppress(EngineError):  # there is none, or it expires
                if opening.done():
                    await opening.result().drop()
        finally:
            opening.cancel()

    async def model(self, url: str) -> str:
        """Return the name of the model that the gateway samples; `url` is that of a session."""
        if not self._model:
            found = await self.request("GET", f"{url}/models")
            try:
                self._model = str(found["data"][0]["id"])
            except (LookupError, TypeError) as error:
                raise self._failed("answered without a model", 200) from error
        return self._model

    async def request(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | None = None,
        *,
        key: str = "",
        within_s: float | None = None,
    ) -> dict[str, Any]:
        """Return the JSON of a reply, {} for an empty one.

        Args:
            key: Header Idempotency-Key of each repetition, which nobody else knows; "": none.
            within_s: Seconds for which it is sent again, and of each reply; default: those of the
                client, and of a turn.

        Raises:
            EngineError: The gateway refused it, or was away for too long.
        """
        ends = time.monotonic() + (self._wait_s if within_s is None else within_s)
        each_s = TURN_S if within_s is None else within_s
        asked_s = 0.0
        headers = {"idempotency-key": key} if key else {}
        if self._token and url == f"{self.where}/sessions":  # agents' URLs need no token
            headers["authorization"] = f"Bearer {self._token}"

        async def sent() -> dict[str, Any]:
            nonlocal asked_s
            asked_s = 0.0
            try:
                reply = await self._http.request(
                    method, url, body, headers=headers, timeout_s=each_s
                )
            except self._http.errors as error:
                raise self._failed(f"did not answer: {type(error).__name__}: {error}") from error
            if reply.status >= 400:
                asked_s = _seconds(reply.headers.get("retry-after", ""))
                raise self._failed(f"answered {reply.status}: {reply.text:.1000}", reply.status)
            try:
                found = reply.json() if reply.data else {}
            except ValueError as error:
                raise self._failed("answered without JSON", reply.status) from error
            return found if isinstance(found, dict) else {}

        def passes(error: BaseException) -> bool:
            return isinstance(error, EngineError) and error.status in _PASSING

        async def pause(seconds: float) -> None:
            await asyncio.sleep(min(max(seconds, asked_s), max(0.0, ends - time.monotonic())))

        return await insist_async(
            sent,
            lambda _: None,
            passes=passes,
            over=lambda: time.monotonic() >= ends,
            pause=pause,
        )

    def _failed(self, text: str, status: int | None = None) -> EngineError:
        """Return an error, without the URL of a session, which is its secret."""
        return EngineError(f"the gateway {self.where} {text}", where=self.where, status=status)


def _seconds(text: str) -> float:
    """Return the pause that a gateway asks for, at most a minute; 0 if it asks for none."""
    return min(float(text), MOST_PAUSE_S) if text.isascii() and text.isdecimal() else 0.0
