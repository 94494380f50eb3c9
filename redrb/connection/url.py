"""Parses the URL of Redis; its query options, such as those of TLS, go to redis-py."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from redis.connection import SSLConnection, parse_url

from redrb.errors import ConfigError

SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster", "unix", "embedded", "fake")

CLUSTER = "+cluster"
"""End of the schemes for a cluster."""

Endpoint: TypeAlias = tuple[str, int]
"""Host and port."""


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL.

    Attributes:
        scheme: One of `SCHEMES`.
        where: Host, port and database, or path; never a password.
        options: Arguments of a redis-py connection, with the password.
        path: The part after `embedded://` or `fake://`.
        nodes: The nodes in the URL of a cluster.
    """

    scheme: str
    where: str
    options: dict[str, Any] = field(repr=False)
    path: str = ""
    nodes: tuple[Endpoint, ...] = ()

    def node(self, endpoint: Endpoint) -> Address:
        """Return the address of one node of a cluster."""
        host, port = endpoint
        return Address(
            self.scheme.removesuffix(CLUSTER),
            f"{host}:{port}",
            {**self.options, "host": host, "port": port},
        )


def parse_address(url: str) -> Address:
    """Parse a URL.

    Raises:
        ConfigError: Unknown scheme, no host, bad port, database or option. The message never has
            the password.
    """
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        if not scheme:
            raise ConfigError(
                f"the Redis URL has no scheme: write redis://host:6379/0. Known schemes: {known}."
            )
        raise ConfigError(f"unknown scheme {scheme!r} in the Redis URL: use one of {known}.")
    if scheme in ("embedded", "fake"):
        path = url.partition("://")[2]
        return Address(scheme, f"{scheme}://{path}", {}, path)
    if scheme.endswith(CLUSTER):
        return _parse_cluster(scheme, url)
    options = _options(scheme, url)
    if scheme == "unix":
        if not options.get("path"):
            raise ConfigError("a unix:// URL needs the socket's path: unix:///run/redis.sock")
        return Address(scheme, f"unix://{options['path']}", options)
    where = f"{options['host']}:{options['port']}/{options.get('db', 0)}"
    return Address(scheme, where, options)


def _parse_cluster(scheme: str, url: str) -> Address:
    """Parse a URL with several nodes: each like a URL with this node only."""
    authority, *path = re.split(r"(?=[/?#])", url.partition("://")[2], maxsplit=1)
    user, at, hosts = authority.rpartition("@")
    single = scheme.removesuffix(CLUSTER)
    names = [name for name in hosts.split(",") if name] or [""]
    each = [_options(scheme, f"{single}://{user}{at}{name}{''.join(path)}") for name in names]
    options = each[0]
    if options.get("db"):
        raise ConfigError("a cluster has database 0 only: leave the number out of the URL.")
    nodes = tuple((node["host"], node["port"]) for node in each)
    return Address(scheme, ",".join(f"{host}:{port}" for host, port in nodes), options, nodes=nodes)


def _options(scheme: str, url: str) -> dict[str, Any]:
    """Return the arguments of a connection to one server.

    Args:
        scheme: As the user wrote it.
        url: URL of the server.
    """
    try:
        options = dict(parse_url(url))  # type: ignore[no-untyped-call]
        port = urlsplit(url).port
    except ValueError:
        # the cause may quote the URL, and with it the password
        hosts = "host[:port],..." if scheme.endswith(CLUSTER) else "host[:port][/database]"
        raise ConfigError(
            f"the {scheme}:// URL does not parse: expected "
            f"{scheme}://[user:password@]{hosts}[?option=value]; "
            "special characters in the password are percent-encoded."
        ) from None
    if scheme == "unix":
        return options
    if "connection_class" in options and options["connection_class"] is not SSLConnection:
        raise ConfigError("the URL may not choose a connection class.")
    options.setdefault("host", "localhost")
    options["port"] = port if port is not None else 6379
    return options
