"""`Http`: nothing of the environment, and no thread, stands between a request and its server."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from redrb.http_client import Http, HttpReply

REPLY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
AUTHORIZATION = {"authorization": "Bearer token"}


async def replied(timeout_s: float) -> tuple[HttpReply, bytes]:
    """Return a server's reply, and the request that it got."""
    got = bytearray()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.extend(await reader.readuntil(b"\r\n\r\n"))
        writer.write(REPLY)
        await writer.drain()
        writer.close()

    http = Http()
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        try:
            reply = await http.request("GET", url, headers=AUTHORIZATION, timeout_s=timeout_s)
        finally:
            await http.close()
    return reply, bytes(got)


def test_proxies_and_passwords_of_the_environment_are_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "netrc").write_text("default login somebody password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    reply, request = asyncio.run(replied(5))
    assert reply.json() == {}
    assert b"bearer token" in request.lower()


def test_a_request_waits_for_no_thread_of_others() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, time.sleep, 2)
        began = time.monotonic()
        await replied(5)
        took_s = time.monotonic() - began
        await busy
        return took_s

    assert asyncio.run(main()) < 1.5
