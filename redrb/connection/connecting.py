"""`connect`: reaches the server, cluster or embedded server of a URL; timeouts, retry limit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeGuard

import redis
from redis.backoff import NoBackoff
from redis.connection import SSLConnection
from redis.driver_info import DriverInfo
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from redrb import environment
from redrb.checks import checked_int
from redrb.connection.client import Client, check_client
from redrb.connection.cluster import Cluster, Topology
from redrb.connection.deadline import Deadline
from redrb.connection.embedded import EmbeddedServer
from redrb.connection.failures import is_cut_off, is_transient, translate
from redrb.connection.fake import fake_pool
from redrb.connection.lending import Connections
from redrb.connection.sentinel import PrimaryPool, Sentinels
from redrb.connection.server_program import OLDEST_SERVER, dotted
from redrb.connection.sockets import PUNCTUAL, log_in
from redrb.connection.url import CLUSTER, Address, parse_address
from redrb.errors import ConfigError, RedrbError, StoreUnavailable, UnsupportedServer

SOCKET_TIMEOUT_S = 20.0
"""Seconds without a byte after which a connection counts as broken; blocking waits are shorter."""

MAX_CONNECTIONS = 10_000
"""Most connections of a client; each waiting thread holds one."""

_READ_SIZE = 1 << 20

_OF_VARIABLE = f"The URL is that of the environment variable {environment.URL}."


def connect(
    url: str | None = None,
    *,
    connect_timeout: float = 5.0,
    retry_s: float = 60.0,
    allow_eviction: bool = False,
    min_replicas: int = 0,
) -> Client:
    """Connect to Redis, or start one.

    Args:
        url: `redis://[user:password@]host[:port][/database]`, the same with `rediss://` for TLS,
            `unix:///path/redis.sock`; `redis+cluster://[user:password@]host:port,host:port` and
            `rediss+cluster://` reach all nodes of a Redis Cluster through any of these nodes, with
            one user, password and options;
            `redis+sentinel://[user:password@]host:port,host:port/service/database` and
            `rediss+sentinel://` reach the primary that these Sentinels name at the moment (options
            that begin with `sentinel_` are for the Sentinels: docs/reference/url.md); `embedded://`
            starts a private server that ends with this process, `embedded:///directory` keeps its
            data there; `fake://name` is fakeredis.
            Default: the variable REDRB_URL.
        connect_timeout: Seconds within which the server must be reached and answer.
        retry_s: Seconds for which later requests are repeated while Redis is away. A repeated
            request stores nothing twice.
        allow_eviction: Use a server whose maxmemory-policy is not noeviction all the same: when its
            memory is full it deletes groups, and the ledger no longer balances.
        min_replicas: Replicas that must have received a put before it returns, so that a failover
            loses no put that has returned. A put that they do not confirm within its timeout (at
            most `retry_s`) raises StoreUnavailable; it may survive or not.

    Returns:
        A client; close it, or use it in a `with` statement.

    Raises:
        ConfigError: The URL is wrong or missing; it is a cluster's URL and the server is not in a
            cluster, or the reverse; its maxmemory-policy is not noeviction (this is checked with
            every new connection, so a later call may raise it too); or `connect_timeout` or
            `retry_s` is out of range.
        StoreUnavailable: No server answers.
        StoreDenied: Wrong user or password.
        UnsupportedServer: The server is older than Redis 7.0, or not a Redis.
    """
    _check_seconds(connect_timeout, retry_s)
    min_replicas = checked_int("min_replicas", min_replicas, 0)
    of_variable = environment.variable(environment.URL)
    url = url or of_variable
    if not url:
        raise ConfigError("no Redis URL: pass one, or set REDRB_URL=redis://host:6379/0.")
    try:
        address = parse_address(url)
        if min_replicas and address.scheme in ("fake", "embedded"):
            raise ConfigError(f"min_replicas={min_replicas}: {address.scheme}:// has no replicas.")
        client = _connected(address, url, connect_timeout, allow_eviction=allow_eviction)
    except RedrbError as error:
        if url == of_variable:  # also where a command has read the variable
            text = str(error)
            error.args = (f"{text}{'' if text.endswith('.') else '.'} {_OF_VARIABLE}",)
        raise
    client.retry_s, client.min_replicas = retry_s, min_replicas
    return client


def client_for(client: Client | str | None) -> tuple[Client, AbstractContextManager[object]]:
    """Return a client, and a context manager that closes it if it was opened here.

    Args:
        client: A client, which the user closes; a URL; or None for the variable REDRB_URL.
    """
    if client is None or isinstance(client, str):
        opened = connect(client)
        return opened, opened
    check_client(client)
    return client, nullcontext()


def _connected(
    address: Address, url: str, connect_timeout: float, *, allow_eviction: bool
) -> Client:
    if address.scheme == "fake":
        return Client(
            Connections(fake_pool(address.path)),
            where=address.where,
            url=url,
            server_version=(7, 0, 0),
        )
    if address.scheme == "embedded":
        return _connect_embedded(address, connect_timeout)
    options = {
        "socket_connect_timeout": connect_timeout,
        "redis_connect_func": None if allow_eviction else log_in,
    }
    if address.nodes:
        return _connect_cluster(address, url, options)
    if address.sentinels:
        return _connect_primary(address, url, options)
    return _connect_server(_pool(address, options), address, url, connect_timeout)


def _check_seconds(connect_timeout: object, retry_s: object) -> None:
    """Check both: a socket's timeout has the same maximum as a lock's, `retry_s` has none."""
    if not _is_number(connect_timeout) or not 0 < connect_timeout <= threading.TIMEOUT_MAX:
        raise ConfigError(f"connect_timeout={connect_timeout!r:.40}: it must be above 0 seconds.")
    if not _is_number(retry_s) or not retry_s >= 0:
        raise ConfigError(f"retry_s={retry_s!r:.40}: it must be 0 seconds or more.")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _connect_cluster(address: Address, url: str, options: Mapping[str, Any]) -> Client:
    """Connect to a cluster through the first node of the URL that answers."""
    timeout = options["socket_connect_timeout"]
    topology = Topology(
        address.nodes, lambda endpoint: _pool(address.node(endpoint), options), timeout
    )
    failures: list[StoreUnavailable | UnsupportedServer] = []
    for endpoint in address.nodes:
        node = address.node(endpoint)
        try:
            version = _check_server(_pool(node, options), node, timeout, in_cluster=True)
            topology.learn(first=endpoint)
        except (StoreUnavailable, UnsupportedServer) as error:
            failures.append(error)
        except RedisError as error:
            if not is_transient(error):
                raise translate(error, address.where) from error
            failures.append(StoreUnavailable(str(error), where=node.where))
        else:
            return Cluster(topology, where=address.where, url=url, server_version=version)
    last = failures[-1]
    if isinstance(last, UnsupportedServer):
        raise last
    raise StoreUnavailable(
        f"no node of the cluster {address.where} is reachable; the last one: {last}",
        where=address.where,
    ) from last


def _connect_primary(address: Address, url: str, options: Mapping[str, Any]) -> Client:
    """Connect to the primary that Sentinels name."""
    timeout = {"socket_connect_timeout": options["socket_connect_timeout"]}
    sentinels = Sentinels({each.where: _pool(each, timeout) for each in address.sentinels})
    arguments = _arguments(address, options)
    login = arguments.pop("redis_connect_func")
    pool = PrimaryPool(address.service, sentinels, arguments, login=login)
    return _connect_server(pool, address, url, timeout["socket_connect_timeout"], sentinels.close)


def _connect_embedded(address: Address, connect_timeout: float) -> Client:
    if address.path and not address.path.startswith("/"):
        raise ConfigError(f"embedded://{address.path}: give an absolute path, embedded:///dir.")
    server = EmbeddedServer(address.path)
    url = f"unix://{server.socket}"
    at_socket = parse_address(url)
    pool = _pool(at_socket, {"socket_connect_timeout": connect_timeout})
    return _connect_server(pool, at_socket, url, connect_timeout, server.close)


def _connect_server(
    pool: redis.ConnectionPool,
    address: Address,
    url: str,
    timeout: float,
    on_close: Callable[[], None] | None = None,
) -> Client:
    """Return a client of a server that answers; `on_close` is called too if it does not."""
    try:
        version = _check_server(pool, address, timeout)
    except BaseException:  # an interrupt, too
        if on_close is not None:
            on_close()
        raise
    return Client(
        Connections(pool), where=address.where, url=url, server_version=version, on_close=on_close
    )


def _pool(address: Address, given: Mapping[str, Any]) -> redis.ConnectionPool:
    """Return the connections to one server."""
    options = _arguments(address, given)
    connection_class = options.pop("connection_class", redis.Connection)
    return redis.ConnectionPool(connection_class=PUNCTUAL[connection_class], **options)


def _arguments(address: Address, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of connections; options in the URL come before those that are given."""
    options = {
        "socket_timeout": SOCKET_TIMEOUT_S,
        "max_connections": MAX_CONNECTIONS,
        **given,
        **address.options,
    }
    if address.scheme != "unix":
        options.setdefault("socket_keepalive", True)
    # CLIENT SETINFO costs a round trip, so it is sent only over TLS: there the server sends session
    # tickets unasked, which redis-py would take for an unread reply on the new connection. They
    # come before the reply to this first command, whose error on servers before 7.2 is ignored.
    tls = issubclass(options.get("connection_class", redis.Connection), SSLConnection)
    return {
        **options,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),  # redis-py's retries replay writes
        "socket_read_size": _READ_SIZE,
        "driver_info": DriverInfo("redrb", "") if tls else None,
    }


def _check_server(
    pool: redis.ConnectionPool, address: Address, timeout: float, *, in_cluster: bool = False
) -> tuple[int, ...]:
    """Return the server's version, by HELLO: the one command that needs no permission."""
    where = address.where
    connection: Any = pool.make_connection()
    try:
        with Deadline(at_most=timeout):
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
        if is_cut_off(error) and address.scheme.partition("+")[0] == "redis":
            raise StoreUnavailable(
                f"the server at {where} accepted the connection, and answered nothing: {error}. "
                "If this port expects TLS, write rediss:// and not redis://.",
                where=where,
            ) from error
        raise translate(error, where) from error
    finally:
        connection.disconnect()
    if not isinstance(answer, list):
        raise UnsupportedServer(f"the server at {where} does not speak Redis' protocol.")
    facts = dict(zip(answer[::2], answer[1::2], strict=False))
    _check_mode(facts.get(b"mode", b""), address, in_cluster=in_cluster)
    return _version(facts.get(b"version", b""), where)


def _check_mode(mode: bytes, address: Address, *, in_cluster: bool) -> None:
    """Refuse a cluster's node under a single server's URL, and the reverse."""
    where, scheme = address.where.partition("/")[0], address.scheme
    if mode == b"sentinel":
        raise ConfigError(
            f"the server at {where} is a Sentinel: use {scheme}+sentinel://{where}/SERVICE/0, with "
            "the name of the service that it watches."
        )
    if mode == b"cluster" and not in_cluster:
        use = "redis+cluster://host:port" if scheme == "unix" else f"{scheme}{CLUSTER}://{where}"
        raise ConfigError(
            f"the server at {address.where} is a node of a Redis Cluster: use {use} "
            "(with user and password as before)."
        )
    if mode != b"cluster" and in_cluster:
        raise ConfigError(
            f"the server at {where} is not a node of a Redis Cluster: use {scheme}://{where} (with "
            "user and password as before)."
        )


def _version(reply: bytes, where: str) -> tuple[int, ...]:
    version = tuple(int(part) for part in reply.decode().split(".") if part.isdigit())
    if version < OLDEST_SERVER:
        raise UnsupportedServer(_too_old(where, reply.decode() or "of unknown version"))
    return version


def _too_old(where: str, version: str) -> str:
    return (
        f"the server at {where} is {version}: redrb needs Redis {dotted(OLDEST_SERVER)} or newer, "
        "or Valkey; embedded:// starts one."
    )
