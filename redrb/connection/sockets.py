"""Connections of redis-py that keep a call's deadline, and refuse a server that evicts keys."""

from __future__ import annotations

import logging
import socket
import ssl
from typing import Any

import redis
from redis import exceptions as upstream
from redis.connection import SSLConnection, UnixDomainSocketConnection

from redrb.connection.deadline import here
from redrb.connection.lending import interruptible
from redrb.errors import ConfigError

_log = logging.getLogger("redrb")


class Punctual:
    """Opens a connection, with TLS and login, within the deadline of the calling thread.

    Attributes:
        usual_timeout: Seconds without a byte after which the connection counts as broken.
        usual_connect_timeout: Seconds within which the server must accept the connection.
    """

    usual_timeout: float | None = None
    usual_connect_timeout: float | None = None

    def __init__(
        self,
        *args: Any,
        socket_timeout: float | None = None,
        socket_connect_timeout: float | None = None,
        **options: Any,
    ) -> None:
        options |= {
            "socket_timeout": socket_timeout,
            "socket_connect_timeout": socket_connect_timeout,
        }
        super().__init__(*args, **options)
        self.usual_timeout = socket_timeout
        self.usual_connect_timeout = socket_connect_timeout

    def connect(self) -> None:
        """Open the connection, unless it is open."""
        with interruptible(self, here().budget):
            super().connect()  # type: ignore[misc]

    def _connect(self) -> Any:
        try:
            return super()._connect()  # type: ignore[misc]
        except OSError as error:  # redis-py's frame holds it, and it the frames of all callers
            raise error.with_traceback(None) from None

    @property
    def socket_timeout(self) -> float | None:
        """The timeout that a socket gets when it is opened."""
        return here().shortened(self.usual_timeout)

    @socket_timeout.setter
    def socket_timeout(self, seconds: float | None) -> None:
        self.usual_timeout = seconds

    @property
    def socket_connect_timeout(self) -> float | None:
        """The timeout of opening a socket."""
        return here().shortened(self.usual_connect_timeout)

    @socket_connect_timeout.setter
    def socket_connect_timeout(self, seconds: float | None) -> None:
        self.usual_connect_timeout = seconds


class _Tcp(Punctual, redis.Connection):
    pass


class _Tls(Punctual, SSLConnection):
    """Says what failed in the TLS handshake, and what may be wrong in the URL."""

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> Any:
        place = f"connecting to {self.host}:{self.port}"
        try:
            return super()._wrap_socket_with_ssl(sock)  # type: ignore[no-untyped-call]
        except ssl.SSLCertVerificationError as error:
            raise upstream.ConnectionError(
                f"Error {place}: the server's certificate is not trusted: {error.verify_message}. "
                "The URL's option ssl_ca_certs=/path/ca.pem names the authority to trust"
            ) from error
        except TimeoutError as error:
            raise upstream.ConnectionError(
                f"Error {place}: the server did not answer the TLS handshake. If this port speaks "
                "plain Redis, write redis:// and not rediss://"
            ) from error
        except (ssl.SSLError, ConnectionResetError) as error:
            raise upstream.ConnectionError(
                f"Error {place}: the TLS handshake failed ({error}). If this port speaks plain "
                "Redis, write redis:// and not rediss://"
            ) from error


class _Unix(Punctual, UnixDomainSocketConnection):
    pass


PUNCTUAL: dict[Any, type[Any]] = {
    redis.Connection: _Tcp,
    SSLConnection: _Tls,
    UnixDomainSocketConnection: _Unix,
}
"""The connection classes of redis-py, and those of this module that replace them."""


def log_in(connection: Any) -> None:
    """Log in on a new connection; raises ConfigError for a server that deletes keys when full."""
    connection.on_connect()
    try:
        _refuse_eviction(connection)
    except ConfigError:
        connection.disconnect()
        raise


def _refuse_eviction(connection: Any) -> None:
    """Check the `maxmemory-policy` of a server: with another one groups would vanish uncounted."""
    place = getattr(connection, "path", None) or f"{connection.host}:{connection.port}"
    connection.send_command("INFO", "memory")
    try:
        facts = connection.read_response().decode()
    except upstream.NoPermissionError:
        _log.debug("the user of Redis at %s may not run INFO: its policy is not known", place)
        return
    if not facts.strip():  # a Sentinel, which `connect` refuses by its mode
        return
    lines = (line.partition(":") for line in facts.splitlines())
    policy = next((value for name, _, value in lines if name == "maxmemory_policy"), None)
    if policy is None:
        raise upstream.InvalidResponse(f"INFO answered {facts!r:.80}")
    if policy != "noeviction":
        raise ConfigError(
            f"Redis at {place} has maxmemory-policy {policy}: when its memory is full it would "
            "delete groups that nobody has trained. Set it to noeviction (`redis-cli config set "
            "maxmemory-policy noeviction`), or accept the loss with "
            "redrb.connect(url, allow_eviction=True)."
        )
