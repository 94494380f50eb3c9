"""URLs of Redis: an address, or an error; neither shows the password."""

from __future__ import annotations

import re
from collections.abc import Iterator

from redrb.connection.url import parse_address
from redrb.errors import ConfigError

SECRET = "hunter2secret"


def one_input(data: bytes) -> None:
    """Parse one URL."""
    url = data.decode(errors="replace")
    try:
        address = parse_address(url)
    except ConfigError as error:
        shown = str(error)
    else:
        shown = f"{address.where} {address!r}"
    authority = re.split(r"[/?#]", url.partition("://")[2], maxsplit=1)[0]
    if f":{SECRET}@" in authority and url.count(SECRET) == 1:
        assert SECRET not in shown, url


def seeds() -> Iterator[bytes]:
    """Yield a URL of each kind."""
    for url in (
        f"redis://maker:{SECRET}@host:6379/0?socket_timeout=3",
        f"rediss://:{SECRET}@[::1]:7000/2?ssl_ca_certs=ca.pem&ssl_check_hostname=false",
        f"redis+cluster://maker:{SECRET}@a:7000,b,[::1]:7002",
        f"rediss+sentinel://m:{SECRET}@a:26379,b/service/3?sentinel_password=x&sentinel_tls=false",
        "unix:///run/redis.sock?db=1",
        "embedded:///data",
        "fake://name",
    ):
        yield url.encode()
