"""fakeredis behind the same client: for tests of code that uses redrb, without a server."""

from __future__ import annotations

import threading

import redis

from redrb.errors import ConfigError

_servers: dict[str, object] = {}
_lock = threading.Lock()


def fake_pool(name: str) -> redis.ConnectionPool:
    """Return a pool on the fake server `name` of this process, made at its first use.

    Raises:
        ConfigError: fakeredis is not installed.
    """
    try:
        import fakeredis
    except ImportError as error:
        raise ConfigError("fake:// needs fakeredis: pip install 'redrb[test]'.") from error
    with _lock:
        server = _servers.setdefault(name, fakeredis.FakeServer(version=(7, 0)))
    return redis.ConnectionPool(
        connection_class=fakeredis.FakeRedisConnection,
        server=server,
        protocol=2,
        max_connections=10_000,
    )
