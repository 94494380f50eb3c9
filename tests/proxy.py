"""A TCP proxy on loopback whose network can be made to fail."""

from __future__ import annotations

import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from redrb.scopes import Closing

_PIECE = 1 << 16
_MOST_HELD = 1 << 20
"""Bytes that one direction holds before the proxy stops reading from its source."""

_SLOW_PIECE = 2048
_SLOW_PAUSE_S = 0.005


class Link:
    """One connection of a client, and the proxy's connection to the server.

    Attributes:
        silent: Packets of this link vanish; nothing is closed.
        left: Bytes of replies that still reach the client before the link is cut; None: all.
    """

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.silent = False
        self.left: int | None = None
        self.held: dict[socket.socket, bytearray] = {client: bytearray(), server: bytearray()}
        self.ended: set[socket.socket] = set()

    def peer(self, each: socket.socket) -> socket.socket:
        return self.server if each is self.client else self.client

    def close(self) -> None:
        self.client.close()
        self.server.close()


class Proxy(Closing):
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
        self._links: dict[socket.socket, Link] = {}
        self._silent: list[Link] = []
        self._asked: deque[tuple[Callable[[], object], threading.Event]] = deque()
        self._frozen = self._slow = self._ended = False
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    @property
    def links(self) -> Sequence[Link]:
        """The connections that are open and not silent."""
        return list(dict.fromkeys(self._links.copy().values()))

    def retarget(self, host: str, port: int) -> None:
        """Forward new connections to another server."""
        self._target = (host, port)

    def freeze(self) -> None:
        """Let packets vanish: connections are accepted, and nothing is forwarded or closed."""
        self._frozen = True

    def thaw(self) -> None:
        """Forward what new connections send; those that were frozen stay open and silent."""
        if self._frozen:
            self._do(lambda: self._silence(self.links))
            self._frozen = False

    def slow_down(self) -> None:
        """Forward at most about 400 kB/s a connection, in small pieces."""
        self._slow = True

    def speed_up(self) -> None:
        """End `slow_down`."""
        self._slow = False

    def cut(self, links: Sequence[Link] | None = None) -> None:
        """Close connections; default: all, the silent ones too."""
        self._do(lambda: self._cut(links))

    def cut_in_reply(self, links: Sequence[Link], after: int) -> None:
        """Close connections when `after` more bytes have reached their clients."""
        for link in links:
            link.left = after

    def half_close(self, links: Sequence[Link]) -> None:
        """End the direction from the server to the client; the other one stays open."""
        self._do(lambda: [self._half_close(link) for link in links])

    def silence(self, links: Sequence[Link]) -> None:
        """Let the packets of these connections vanish, as a firewall does that forgot them."""
        self._do(lambda: self._silence(links))

    def close(self) -> None:
        """Close all connections, and accept none from now on."""
        self._ended = True
        self._waker.send(b"x")
        self._thread.join(10)
        self._cut(None)
        for each in (self._listener, self._waker, self._woken):
            each.close()
        self._selector.close()

    def _do(self, action: Callable[[], object]) -> None:
        """Run an action in the proxy's thread, and wait until it is done."""
        done = threading.Event()
        self._asked.append((action, done))
        self._waker.send(b"x")
        assert done.wait(10), "the proxy hangs"

    def _run(self) -> None:
        pause = threading.Event()
        while not self._ended:
            for event, mask in self._selector.select(1.0):
                ready = event.fileobj
                assert isinstance(ready, socket.socket)
                if ready is self._listener:
                    self._accept()
                elif ready is self._woken:
                    self._woken.recv(_PIECE)
                else:
                    self._serve(ready, mask)
            while self._asked:
                action, done = self._asked.popleft()
                action()
                done.set()
            if self._slow:
                pause.wait(_SLOW_PAUSE_S)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(self._target, timeout=5)
        except OSError:
            client.close()
            return
        link = Link(client, server)
        for each in (client, server):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._links[each] = link
            self._selector.register(each, selectors.EVENT_READ)

    def _serve(self, ready: socket.socket, mask: int) -> None:
        link = self._links.get(ready)
        if link is None:
            return
        try:
            if mask & selectors.EVENT_READ:
                self._receive(link, ready)
            if mask & selectors.EVENT_WRITE:
                self._send(link, ready)
        except OSError:
            self._cut([link])
            return
        self._watch(link)

    def _receive(self, link: Link, source: socket.socket) -> None:
        piece = source.recv(_SLOW_PIECE if self._slow else _PIECE)
        if self._frozen:
            return
        if not piece:
            link.ended.add(source)
            if not link.held[link.peer(source)]:
                self._cut([link])
            return
        if source is link.server and link.left is not None:
            piece = piece[: link.left]
            link.left -= len(piece)
        link.held[link.peer(source)] += piece
        self._send(link, link.peer(source))

    def _send(self, link: Link, to: socket.socket) -> None:
        held = link.held[to]
        if held:
            with suppress(BlockingIOError):
                del held[: to.send(held)]
        cut = to is link.client and link.left == 0
        if not held and (cut or link.peer(to) in link.ended):
            self._cut([link])

    def _watch(self, link: Link) -> None:
        """Wait for what each side of a link can do next."""
        for each in (link.client, link.server):
            if each not in self._links:
                return
            full = len(link.held[link.peer(each)]) > _MOST_HELD
            mask = 0 if full or each in link.ended else selectors.EVENT_READ
            mask |= selectors.EVENT_WRITE if link.held[each] else 0
            if mask == 0:
                with suppress(KeyError):
                    self._selector.unregister(each)
            elif each in self._selector.get_map():
                self._selector.modify(each, mask)
            else:
                self._selector.register(each, mask)

    def _half_close(self, link: Link) -> None:
        with suppress(OSError):
            link.client.shutdown(socket.SHUT_WR)

    def _silence(self, links: Sequence[Link]) -> None:
        for link in links:
            link.silent = True
            self._forget(link)
            self._silent.append(link)

    def _cut(self, links: Sequence[Link] | None) -> None:
        if links is None:
            links = [*self.links, *self._silent]
            self._silent.clear()
        for link in links:
            self._forget(link)
            link.close()

    def _forget(self, link: Link) -> None:
        for each in (link.client, link.server):
            self._links.pop(each, None)
            with suppress(KeyError, ValueError):
                self._selector.unregister(each)
