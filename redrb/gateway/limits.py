"""Limits of a gateway: bodies of requests, and calls that block, each with a place and a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from redrb.gateway.messages import Refused

MOST_CALLS = 64
"""Most calls of a kind at the same time: those of turns, opens, and rewards."""

MOST_PARSED = 4
"""Most requests with a long body that are parsed at the same time."""

LONG_BYTES = 2**16
"""Bytes of a long body; shorter ones are parsed by any thread."""

SMALL_BYTES = 2**20
"""Largest body that opens or ends a session: each sample gets a copy."""

ALL_BYTES = 256 * 2**20
"""Most bytes of all bodies that are not parsed yet."""

BODY_S = 60.0
"""Seconds in which the body of a request must come."""

WAIT_S = 10.0
"""Seconds for which a request waits for the first weights, a right, or behind others."""

REACH_S = 5.0
"""Seconds for which a session waits for the weights of its right."""

BUSY = "the gateway cannot answer now: send the request again."
BROKEN = "Redis refuses this, and would again: the gateway's log says why."

T = TypeVar("T")


@asynccontextmanager
async def within(seconds: float, text: str, status: int = 503) -> AsyncIterator[None]:
    """Refuse the request of a block that takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise Refused(text, status) from error


class Threads:
    """Calls at the same time, in threads; further ones wait for a place."""

    def __init__(self, most: int) -> None:
        self._places, self._threads = asyncio.Semaphore(most), ThreadPoolExecutor(most)

    async def run(self, call: Callable[..., T], *given: Any, request: Request | None = None) -> T:
        """Return the result of a call; the end of the gateway does not wait for it.

        Args:
            call: It may block.
            given: Arguments of the call.
            request: The call is not begun if it has nobody who waits for its reply any more.
        """
        async with within(WAIT_S, BUSY):
            await self._places.acquire()
        try:
            if request is not None and await request.is_disconnected():
                raise Refused(BUSY, 503)
            return await asyncio.get_running_loop().run_in_executor(self._threads, call, *given)
        finally:
            self._places.release()


class Bodies:
    """The bodies of requests; `held` counts the bytes of those that are not parsed yet."""

    def __init__(self) -> None:
        self.held = 0

    @asynccontextmanager
    async def of(self, request: Request) -> AsyncIterator[bytes]:
        """Give the body of a request with JSON: a page of another site cannot send such a one."""
        if not request.headers.get("content-type", "").startswith("application/json"):
            raise Refused("send JSON, with content-type: application/json.", 415)
        data = bytearray()
        try:
            async with within(BODY_S, f"the body did not come within {BODY_S:g} s.", 408):
                async for part in request.stream():
                    data += part
                    self.held += len(part)
                    if self.held > ALL_BYTES:
                        raise Refused(BUSY, 503)
            yield bytes(data)
        except ClientDisconnect as error:
            raise Refused("the body broke off.") from error
        finally:
            self.held -= len(data)
