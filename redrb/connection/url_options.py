"""The options of a URL of Redis, after its `?`; errors name the one that is most likely meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

from redrb.errors import ConfigError

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


def check_options(scheme: str, names: Iterable[str], *, tls: bool, prefix: str = "") -> None:
    """Check the names of options.

    Args:
        scheme: Scheme of the URL.
        names: The names that it has.
        tls: Whether the connection uses TLS.
        prefix: The beginning of the names as the user wrote them; left out in `names`.

    Raises:
        ConfigError: Redis has no such option, or not with this scheme. The message has no values:
            one of them may be a password.
    """
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
