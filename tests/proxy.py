"""A TCP proxy on loopback whose network can be made to fail."""

from __future__ import annotations

import selectors
import socket
import threading
from types import TracebackType
from typing import Self

_PIECE = 1 << 16


class Proxy:
    """Forwards connections to a server, from a thread of its own.

    Attributes:
        port: Port on 127.0.0.1 that clients connect to.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._peers: dict[socket.socket, socket.socket] = {}
        self._silent: list[socket.socket] = []
        self._lock = threading.Lock()
        self._frozen = self._ended = False
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def freeze(self) -> None:
        """Let packets vanish: connections are accepted, and nothing is forwarded or closed."""
        self._frozen = True

    def thaw(self) -> None:
        """Forward what new connections send; those that were frozen stay open and silent."""
        if self._frozen:
            self._silent += self._forget_all()
            self._frozen = False

    def cut(self) -> None:
        """Close all connections."""
        for each in (*self._forget_all(), *self._silent):
            each.close()
        self._silent.clear()

    def close(self) -> None:
        """Close all connections, and accept none from now on."""
        self._ended = True
        self._waker.send(b"x")
        self._thread.join(10)
        self.cut()
        for each in (self._listener, self._waker, self._woken):
            each.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._ended:
            for event, _ in self._selector.select(1.0):
                ready = event.fileobj
                if ready is self._listener:
                    self._accept()
                elif ready is not self._woken and isinstance(ready, socket.socket):
                    self._forward(ready)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(self._target, timeout=5)
        with self._lock:
            self._peers |= {client: server, server: client}
        for each in (client, server):
            self._selector.register(each, selectors.EVENT_READ)

    def _forward(self, ready: socket.socket) -> None:
        try:
            piece = ready.recv(_PIECE)
            if self._frozen:
                return
            with self._lock:
                peer = self._peers.get(ready)
            if piece and peer is not None:
                peer.sendall(piece)
                return
        except OSError:
            peer = self._peers.get(ready)
        for each in (ready, peer):
            if each is not None:
                self._forget(each)
                each.close()

    def _forget_all(self) -> list[socket.socket]:
        with self._lock:
            known = list(self._peers)
        for each in known:
            self._forget(each)
        return known

    def _forget(self, each: socket.socket) -> None:
        with self._lock:
            self._peers.pop(each, None)
        try:
            self._selector.unregister(each)
        except (KeyError, ValueError):
            return
