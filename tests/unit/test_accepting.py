"""Servers of this process that close leave no connection open."""

from __future__ import annotations

import asyncio
import gc
import socket
from contextlib import suppress

import pytest


@pytest.mark.parametrize("turns", range(6))
def test_a_server_that_closes_while_it_accepts_leaves_no_connection_open(turns: int) -> None:
    async def run() -> socket.socket:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        client = socket.create_connection(server.sockets[0].getsockname(), timeout=10)
        for _ in range(turns):  # it begins to accept in the first, and has accepted in the last
            await asyncio.sleep(0)
        server.close()
        for _ in range(6):
            await asyncio.sleep(0)
        for transport in list(loop._transports.values()):  # type: ignore[attr-defined]
            transport.abort()
        await asyncio.sleep(0.01)
        return client

    with asyncio.run(run()) as client:
        gc.collect()  # an unclosed socket is an error of this test
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""
