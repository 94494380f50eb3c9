"""Serves a gateway: as the command `redrb gateway`, or within a maker."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from redrb.gateway.app import Gateway, OnEdited
from redrb.gateway.chat import ChatServer
from redrb.gateway.store import SessionStore
from redrb.stream.worker import Worker
from redrb.train.engines import EngineWeights
from redrb.watch.page.server import serve

LOOPBACK = ("127.0.0.1", "localhost")

_CONNECTIONS = 4096
_GRACE_S = 10
_IDLE_S = 75
"""Clients close their idle connections sooner, and send nothing on one that is being closed."""


async def serve_gateway(
    store: SessionStore,
    chat: ChatServer,
    weights: EngineWeights,
    worker: Worker,
    listening: socket.socket,
    ready: Callable[[], None],
    *,
    host: str = LOOPBACK[0],
    token: str = "",
    on_edited: OnEdited = "branch",
    stopped: asyncio.Event | None = None,
) -> None:
    """Serve sessions until a signal comes, or `stopped` is set; close `chat` and `weights`.

    Args:
        worker: Announces the gateway as a maker of the task.
        listening: Socket of the server.
        ready: Called when the server takes requests.
        host: Address that it is served at: on this machine, other names of the host are refused.
        token, on_edited: Of `Gateway`.
        stopped: Ends it; signals are left to whoever sets it.

    Raises:
        RedrbError: The first weights could not be loaded.
    """
    gateway = Gateway(store, chat, weights, worker, token=token, on_edited=on_edited)
    try:
        await serve(
            gateway.app(LOOPBACK if host in LOOPBACK else ("*",)),
            gateway,
            listening,
            ready,
            connections=_CONNECTIONS,
            grace_s=_GRACE_S,
            idle_s=_IDLE_S,
            stopped=stopped,
        )
    finally:
        weights.close()
        await chat.close()
