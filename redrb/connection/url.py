"""Parses the URL of Redis; its options, such as those of TLS, go to redis-py."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qs, parse_qsl, quote, unquote, urlencode, urlsplit

from redis.connection import parse_url

from redrb.errors import ConfigError

SCHEMES = (
    "redis rediss redis+cluster rediss+cluster redis+sentinel rediss+sentinel unix embedded fake"
).split()

CLUSTER = "+cluster"
"""End of the schemes for a cluster."""

SENTINEL = "+sentinel"
"""End of the schemes for a primary that Sentinels name."""

_OF_SENTINELS = "sentinel_"
"""Begin of the options for connections to Sentinels."""

SENTINEL_PORT = 26379

_FORMS = {"cluster": "host[:port],...", "sentinel": "host[:port],.../service[/database]"}

COMMON: Final = (
    "db",
    "username",
    "password",
    "client_name",
    "socket_timeout",
    "socket_connect_timeout",
    "max_connections",
)
TCP: Final = ("socket_keepalive",)
TLS: Final = (
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_ca_data",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_password",
    "ssl_cert_reqs",
    "ssl_check_hostname",
    "ssl_min_version",
    "ssl_ciphers",
)
"""Options of redis-py's connections, which documents them."""

_TLS_PREFIX = "ssl_"
_LEAST_RATIO = 0.4
"""Similarity below which an option is not taken for a misspelled one."""

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
        service: Name under which Sentinels watch the primary.
        sentinels: Address of each Sentinel in the URL.
    """

    scheme: str
    where: str
    options: dict[str, Any] = field(repr=False)
    path: str = ""
    nodes: tuple[Endpoint, ...] = ()
    service: str = ""
    sentinels: tuple[Address, ...] = ()

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
    if not isinstance(url, str):
        raise ConfigError(f"the Redis URL is a {type(url).__name__}: pass a string.")
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
    if "@" in url.partition("?")[2]:  # most likely in a password: what follows is not shown
        raise ConfigError(
            f"the {scheme}:// URL has an @ after a question mark: special characters in the "
            "password and in options are percent-encoded (%3F for ?, %40 for @)."
        )
    if scheme.endswith(CLUSTER):
        return _parse_cluster(scheme, url)
    if scheme.endswith(SENTINEL):
        return _parse_sentinels(scheme, url)
    options = _options(scheme, url)
    if scheme == "unix":
        if not options.get("path"):
            raise ConfigError("a unix:// URL needs the socket's path: unix:///run/redis.sock")
        return Address(scheme, f"unix://{options['path']}", options)
    where = f"{options['host']}:{options['port']}/{options.get('db', 0)}"
    return Address(scheme, where, options)


def _parse_cluster(scheme: str, url: str) -> Address:
    """Parse a URL with several nodes: each like a URL with this node only."""
    login, names, rest = _divided(url)
    single = scheme.removesuffix(CLUSTER)
    each = [_options(scheme, f"{single}://{login}{name}{rest}") for name in names]
    options = each[0]
    if options.get("db"):
        raise ConfigError("a cluster has database 0 only: leave the number out of the URL.")
    nodes = tuple((node["host"], node["port"]) for node in each)
    return Address(scheme, ",".join(f"{host}:{port}" for host, port in nodes), options, nodes=nodes)


def _parse_sentinels(scheme: str, url: str) -> Address:
    """Parse a URL with several Sentinels, a service and a database."""
    login, names, rest = _divided(url)
    # User, password and options are those of the primary, those that begin with `sentinel_` are of
    # the Sentinels, which use TLS as the primary does unless `sentinel_tls` says otherwise.
    single = scheme.removesuffix(SENTINEL)
    path, _, query = rest.partition("#")[0].partition("?")
    service, _, database = path.strip("/").partition("/")
    if not service:
        raise ConfigError(
            f"a {scheme}:// URL needs the name of the service that the Sentinels watch: "
            f"{scheme}://host1:26379,host2:26379/service/0"
        )
    given = parse_qsl(query, keep_blank_values=True)
    own = {
        name.removeprefix(_OF_SENTINELS): value
        for name, value in given
        if name.startswith(_OF_SENTINELS)
    }
    tls = own.pop("tls", str(single == "rediss")).lower()
    if tls not in ("true", "false"):
        raise ConfigError(f"sentinel_tls={tls:.20} in the URL: it must be true or false.")
    user, password = (quote(own.pop(name, ""), safe="") for name in ("username", "password"))
    at = f"{user}:{password}@" if user or password else ""
    kind, query = "rediss" if tls == "true" else "redis", f"?{urlencode(own)}" if own else ""
    each = [
        _options(
            scheme, f"{kind}://{at}{name}{query}", default_port=SENTINEL_PORT, prefix=_OF_SENTINELS
        )
        for name in names
    ]
    sentinels = tuple(Address(kind, f"{one['host']}:{one['port']}", one) for one in each)
    others = [pair for pair in given if not pair[0].startswith(_OF_SENTINELS)]
    query = f"?{urlencode(others)}" if others else ""
    options = _options(scheme, f"{single}://{login}localhost/{database}{query}")
    del options["host"], options["port"]
    where = f"{service}/{options.get('db', 0)} of the Sentinels " + ",".join(
        sentinel.where for sentinel in sentinels
    )
    return Address(scheme, where, options, service=unquote(service), sentinels=sentinels)


def _divided(url: str) -> tuple[str, list[str], str]:
    """Return the login with its "@", the hosts with their ports, and the rest of a URL."""
    authority, *rest = re.split(r"(?=[/?#])", url.partition("://")[2], maxsplit=1)
    user, at, hosts = authority.rpartition("@")
    return user + at, [name for name in hosts.split(",") if name] or [""], "".join(rest)


def _options(
    scheme: str, url: str, *, default_port: int = 6379, prefix: str = ""
) -> dict[str, Any]:
    """Return the arguments of a connection to one server."""
    try:
        parts = urlsplit(url)
        names = parse_qs(parts.query, keep_blank_values=True)
        _check_options(scheme, names, tls=parts.scheme == "rediss", prefix=prefix)
        options = dict(parse_url(url))  # type: ignore[no-untyped-call]
        port = parts.port
    except ConfigError:
        raise
    except ValueError:
        # the cause may quote the URL, and with it the password
        hosts = _FORMS.get(scheme.partition("+")[2], "host[:port][/database]")
        raise ConfigError(
            f"the {scheme}:// URL does not parse: expected "
            f"{scheme}://[user:password@]{hosts}[?option=value]; "
            "special characters in the password are percent-encoded."
        ) from None
    if scheme == "unix":
        return options
    database = unquote(parts.path).strip("/")
    if database and not (database.isascii() and database.isdigit()):
        # redis-py would use database 0
        raise ConfigError(f"the database {database:.40} in the Redis URL is not a number.")
    options.setdefault("host", "localhost")
    options["port"] = port if port is not None else default_port
    return options


def _check_options(scheme: str, names: Iterable[str], *, tls: bool, prefix: str = "") -> None:
    """Check the names of options; `prefix` stood before them, as the user wrote them."""
    known = COMMON if scheme == "unix" else COMMON + TCP
    for name in names:
        if name in known or (tls and name in TLS):
            continue
        secure = f"{prefix}tls=true" if prefix else scheme.replace("redis", "rediss", 1) + "://"
        if name in TLS and scheme != "unix":
            raise ConfigError(
                f"the option {prefix}{name} is one of TLS: write {secure} in the URL."
            )
        nearest = _nearest(name, known if scheme == "unix" else known + TLS)
        hint = f" Is it {prefix}{nearest}?" if nearest else ""
        if nearest in TLS and not tls:
            hint += f" This one needs TLS: {secure}."
        # no values: one of them may be a password
        valid = [prefix + each for each in (known + TLS if tls else known)]
        raise ConfigError(
            f"the {scheme}:// URL has no option {prefix + name!r:.80}.{hint} Its options are "
            f"{', '.join(valid)}."
        )


def _nearest(name: str, options: Iterable[str]) -> str:
    """Return the most similar option; "" if none is similar."""

    def similarity(option: str) -> float:
        short = option.removeprefix(_TLS_PREFIX)
        if name.lower() in short.split("_"):
            return 1.0
        pairs = (difflib.SequenceMatcher(None, name.lower(), each) for each in (option, short))
        return max(pair.ratio() for pair in pairs)

    best = max(options, key=similarity)
    return best if similarity(best) >= _LEAST_RATIO else ""
