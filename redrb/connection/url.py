"""Where Redis is: one URL, checked, and a form of it that may be shown to people."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from redis.connection import SSLConnection, parse_url

from redrb.errors import ConfigError

SCHEMES = ("redis", "rediss", "unix", "embedded", "fake")


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL.

    Attributes:
        scheme: One of `SCHEMES`.
        where: Host, port and database, or path; never a user's password.
        options: Arguments of a redis-py connection, the password among them.
        path: The part after `embedded://` or `fake://`.
    """

    scheme: str
    where: str
    options: dict[str, Any] = field(repr=False)
    path: str = ""


def parse_address(url: str) -> Address:
    """Parse a URL.

    Raises:
        ConfigError: Unknown scheme, no host, bad port or option. It never shows the password.
    """
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        if not scheme:
            raise ConfigError(
                f"the Redis URL has no scheme: write redis://host:6379/0. Known are {known}."
            )
        raise ConfigError(f"unknown scheme {scheme!r} in the Redis URL: use one of {known}.")
    if scheme in ("embedded", "fake"):
        path = url.partition("://")[2]
        return Address(scheme, f"{scheme}://{path}", {}, path)
    try:
        options = dict(parse_url(url))  # type: ignore[no-untyped-call]
        port = urlsplit(url).port
    except ValueError:
        # the cause may quote the URL, and with it the password
        raise ConfigError(
            f"the {scheme}:// URL does not parse: expected "
            f"{scheme}://[user:password@]host[:port][/database][?option=value]; "
            "special characters in the password are percent-encoded."
        ) from None
    if scheme == "unix":
        if not options.get("path"):
            raise ConfigError("a unix:// URL needs the socket's path: unix:///run/redis.sock")
        return Address(scheme, f"unix://{options['path']}", options)
    if "connection_class" in options and options["connection_class"] is not SSLConnection:
        raise ConfigError("the URL may not choose a connection class.")
    options.setdefault("host", "localhost")
    options["port"] = port if port is not None else 6379
    where = f"{options['host']}:{options['port']}/{options.get('db', 0)}"
    return Address(scheme, where, options)
