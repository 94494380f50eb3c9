"""A primary, its replicas and three Sentinels for tests, on loopback."""

from __future__ import annotations

import time
from collections.abc import Callable

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.servers import Server

SERVICE = "experience"
DOWN_AFTER_MS = 500


class Watched:
    """Servers that Sentinels watch; the first one is the primary at the beginning."""

    def __init__(
        self, program: str, *, replicas: int = 1, password: str = "", sentinel_password: str = ""
    ) -> None:
        self.password, self.sentinel_password = password, sentinel_password
        secret = ("--requirepass", password, "--masterauth", password) if password else ()
        self.servers = [Server(program, *secret, *_FAST, password=password)]
        primary = str(self.servers[0].port)
        self.servers += [
            Server(program, *secret, *_FAST, "--replicaof", "127.0.0.1", primary, password=password)
            for _ in range(replicas)
        ]
        self.wait_for_replicas(self.servers[0], replicas)
        self.sentinels = [self._sentinel(program, primary) for _ in range(3)]
        self._wait_until_known(replicas)

    @property
    def hosts(self) -> str:
        """The Sentinels, as a URL has them."""
        return ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)

    @property
    def url(self) -> str:
        login = f":{self.password}@" if self.password else ""
        own = f"?sentinel_password={self.sentinel_password}" if self.sentinel_password else ""
        return f"redis+sentinel://{login}{self.hosts}/{SERVICE}/0{own}"

    def primary(self) -> Server:
        """Return the server that the first Sentinel calls the primary."""
        with self._client(self.sentinels[0], self.sentinel_password) as sentinel:
            _, port = sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return next(server for server in self.servers if server.port == int(port))

    def wait_for_replicas(self, primary: Server, count: int) -> None:
        """Wait until so many replicas follow a primary."""
        with self._client(primary, self.password) as client:
            _until(
                lambda: (
                    [
                        each["state"] for each in _info(client).values() if isinstance(each, dict)
                    ].count("online")
                    >= count
                )
            )

    def close(self) -> None:
        for server in (*self.sentinels, *self.servers):
            server.close()

    def _sentinel(self, program: str, port: str) -> Server:
        own, theirs = self.sentinel_password, self.password
        lines = [
            f"sentinel monitor {SERVICE} 127.0.0.1 {port} 2",
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {SERVICE} 3000",
            *([f"sentinel auth-pass {SERVICE} {theirs}"] if theirs else []),
            *([f"requirepass {own}"] if own else []),
        ]
        return Server(program, sentinel="\n".join(lines), password=own)

    def _wait_until_known(self, replicas: int) -> None:
        """Wait until each Sentinel knows the replicas and the other Sentinels: then it can vote."""
        for sentinel in self.sentinels:
            with self._client(sentinel, self.sentinel_password) as client:

                def count(of: str, client: redis.Redis = client) -> int:
                    state: dict[str, int] = client.sentinel_master(SERVICE)
                    return state[of]

                _until(lambda: count("num-slaves") >= replicas)
                _until(lambda: count("num-other-sentinels") == 2)

    def _client(self, server: Server, password: str) -> redis.Redis:
        return redis.Redis(
            port=server.port,
            password=password or None,
            retry=Retry(NoBackoff(), 0),
            decode_responses=True,
        )


_FAST = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")


def _info(client: redis.Redis) -> dict[str, object]:
    found = client.info("replication")
    assert isinstance(found, dict)
    return found


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
