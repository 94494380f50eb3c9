"""Connections to the primary that Sentinels name at the moment, also after a failover."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import redis
from redis.connection import SSLConnection
from redis.exceptions import AuthenticationError, NoPermissionError
from redis.exceptions import ConnectionError as Broken
from redis.exceptions import TimeoutError as Silent
from redis.sentinel import (
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)

from redrb.connection.sockets import Punctual
from redrb.connection.url import Endpoint

Login: TypeAlias = Callable[[Any], None]


class Sentinels:
    """Asks Sentinels where the primary of a service is; the last one that knew it is asked first.

    The pool of redis-py asks it for each new connection.
    """

    def __init__(self, pools: Mapping[str, redis.ConnectionPool]) -> None:
        """Note the connections to each Sentinel, by host and port; nothing is sent."""
        self._clients = {name: redis.Redis(connection_pool=pool) for name, pool in pools.items()}
        self._order: Sequence[str] = tuple(pools)

    def discover_master(self, service: str) -> Endpoint:
        """Return host and port of the primary.

        Raises:
            redis.exceptions.ConnectionError: No Sentinel that answered knows it.
            redis.exceptions.AuthenticationError: None answered, and one refused user or password;
                NoPermissionError for the command.
        """
        failures: dict[str, Exception] = {}
        for name in self._order:
            try:
                found: Any = self._clients[name].sentinel_get_master_addr_by_name(service)
            except (Broken, Silent, NoPermissionError) as error:
                failures[name] = error
                continue
            if found:
                self._order = (name, *(other for other in self._order if other != name))
                host, port = found
                return host.decode() if isinstance(host, bytes) else host, int(port)
            failures[name] = Broken("it watches no such service")
        for name, failure in failures.items():
            if isinstance(failure, AuthenticationError | NoPermissionError):
                raise type(failure)(f"the Sentinel {name} answered: {failure}") from failure
        reasons = "; ".join(f"{name}: {failure}" for name, failure in failures.items())
        raise Broken(f"Error connecting to {service!r}: no Sentinel names its primary ({reasons})")

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()


class _Managed(Punctual, SentinelManagedConnection):
    pass


class _ManagedTls(Punctual, SentinelManagedSSLConnection):
    pass


class PrimaryPool(SentinelConnectionPool):
    """Connections to the primary of a service. Each new one asks the Sentinels where it is."""

    def __init__(
        self,
        service: str,
        sentinels: Sentinels,
        options: Mapping[str, Any],
        *,
        login: Login | None,
    ) -> None:
        """Prepare connections that log in by `login`; None: as redis-py does. Nothing is sent."""
        given = dict(options)
        tls = issubclass(given.pop("connection_class", redis.Connection), SSLConnection)

        def checked_login(connection: Any) -> None:
            (login or _log_in)(connection)
            _refuse_replica(connection)

        super().__init__(  # type: ignore[no-untyped-call]
            service,
            sentinels,
            connection_class=_ManagedTls if tls else _Managed,
            **given,
            redis_connect_func=checked_login,
        )


def _log_in(connection: Any) -> None:
    connection.on_connect()


def _refuse_replica(connection: Any) -> None:
    """Refuse a server that is not, or no longer, the primary; raises redis-py's exception."""
    # a Sentinel may be the last to learn of a failover
    connection.send_command("HELLO", 2)  # needs no permission, and names the role
    answer = connection.read_response()
    role = dict(zip(answer[::2], answer[1::2], strict=False)).get(b"role", b"")
    if role != b"master":
        place = f"{connection.host}:{connection.port}"
        raise Broken(f"Error connecting to {place}: it is a {role.decode()}, not the primary")
