"""From a URL to a client: the server is reached, checked, and its version known."""

from __future__ import annotations

from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from redrb import environment
from redrb.connection.client import Client
from redrb.connection.embedded import OLDEST_SERVER, EmbeddedServer
from redrb.connection.failures import translate
from redrb.connection.fake import fake_pool
from redrb.connection.url import Address, parse_address
from redrb.errors import ConfigError, RedrbError, StoreUnavailable, UnsupportedServer

SOCKET_TIMEOUT_S = 20.0
"""Longest silence of a server before a connection counts as broken; blocking waits are shorter."""

MAX_CONNECTIONS = 10_000
"""Of one client; each thread that waits holds one."""

_READ_SIZE = 1 << 20


def connect(
    url: str | None = None, *, connect_timeout: float = 5.0, retry_s: float = 60.0
) -> Client:
    """Connect to Redis, or start one.

    Args:
        url: `redis://[user:password@]host[:port][/database]`, the same with `rediss://` for TLS,
            `unix:///path/redis.sock`; `embedded://` starts a private real server that ends with
            this process, `embedded:///directory` keeps its data there; `fake://name` is fakeredis.
            Default: the variable REDRB_URL.
        connect_timeout: Seconds within which the server must be reached and answer.
        retry_s: Seconds for which later requests are repeated while Redis is away. Nothing is
            stored twice by that.

    Returns:
        A client; close it, or use it in a `with` statement.

    Raises:
        ConfigError: The URL is wrong or missing.
        StoreUnavailable: Nothing answers there.
        StoreDenied: Wrong user or password.
        UnsupportedServer: Older than Redis 6.2, or no Redis.
    """
    url = url or environment.variable(environment.URL)
    if not url:
        raise ConfigError("no Redis URL: pass one, or set REDRB_URL=redis://host:6379/0.")
    address = parse_address(url)
    if address.scheme == "fake":
        return Client(
            fake_pool(address.path),
            where=address.where,
            url=url,
            server_version=(7, 0, 0),
            retry_s=retry_s,
        )
    if address.scheme == "embedded":
        return _connect_embedded(address, connect_timeout, retry_s)
    pool = _pool(address, connect_timeout)
    try:
        version = _check_server(pool, address.where, connect_timeout)
    except RedrbError:
        pool.disconnect()
        raise
    return Client(pool, where=address.where, url=url, server_version=version, retry_s=retry_s)


def _connect_embedded(address: Address, connect_timeout: float, retry_s: float) -> Client:
    if address.path and not address.path.startswith("/"):
        raise ConfigError(f"embedded://{address.path}: give an absolute path, embedded:///dir.")
    server = EmbeddedServer(address.path)
    url = f"unix://{server.socket}"
    at_socket = parse_address(url)
    pool = _pool(at_socket, connect_timeout)
    try:
        version = _check_server(pool, at_socket.where, connect_timeout)
    except RedrbError:
        server.close()
        raise
    return Client(
        pool,
        where=at_socket.where,
        url=url,
        server_version=version,
        retry_s=retry_s,
        on_close=server.close,
    )


def _pool(address: Address, connect_timeout: float) -> redis.ConnectionPool:
    options = dict(address.options)
    connection_class = options.pop("connection_class", redis.Connection)
    options.setdefault("socket_timeout", SOCKET_TIMEOUT_S)
    options.setdefault("socket_connect_timeout", connect_timeout)
    options.setdefault("max_connections", MAX_CONNECTIONS)
    if address.scheme != "unix":
        options.setdefault("socket_keepalive", True)
    return redis.ConnectionPool(
        connection_class=connection_class,
        **options,
        protocol=2,
        retry=Retry(NoBackoff(), 0),  # redis-py's own retries replay writes
        socket_read_size=_READ_SIZE,
        driver_info=None,  # CLIENT SETINFO is one more round trip, unknown before 7.2
    )


def _check_server(pool: redis.ConnectionPool, where: str, timeout: float) -> tuple[int, ...]:
    """Return the server's version, asked for with the one command that needs no permission."""
    connection: Any = pool.make_connection()
    connection.socket_timeout = timeout
    try:
        connection.connect()
        connection.send_command("HELLO", 2)
        answer = connection.read_response()
    except ResponseError as error:
        if "unknown command" in str(error).lower():
            raise UnsupportedServer(_too_old(where, "older than 6.0")) from error
        raise translate(error, where) from error
    except (RedisError, OSError) as error:
        if not isinstance(error, RedisError):
            raise StoreUnavailable(f"cannot reach {where}: {error}", where=where) from error
        raise translate(error, where) from error
    finally:
        connection.disconnect()
    return _version(answer, where)


def _version(answer: object, where: str) -> tuple[int, ...]:
    if not isinstance(answer, list):
        raise UnsupportedServer(f"what answers at {where} does not speak Redis' protocol.")
    told = dict(zip(answer[::2], answer[1::2], strict=False)).get(b"version", b"")
    version = tuple(int(part) for part in told.decode().split(".") if part.isdigit())
    if version < OLDEST_SERVER:
        raise UnsupportedServer(_too_old(where, told.decode() or "of unknown version"))
    return version


def _too_old(where: str, version: str) -> str:
    return (
        f"the server at {where} is {version}: redrb needs Redis 6.2 or newer (or Valkey). "
        "embedded:// brings one along."
    )
