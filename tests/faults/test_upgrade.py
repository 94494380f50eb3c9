"""Redis is replaced by a newer server in the middle of a run (docs/how-to/upgrade-redis.md)."""

from __future__ import annotations

import threading
import time

import pytest
import redis

import redrb
from redrb.connection.server_program import bundled_server, identify
from tests.samples import numbered, numbers
from tests.sentinels import SERVICE, Watched
from tests.servers import Server, programs
from tests.tools import need

GROUPS = 400


def test_no_group_is_lost_or_taken_twice_when_the_server_is_upgraded(namespace: str) -> None:
    old = need("redis-server")
    # Valkey does not read the data of Redis 7.4 and later: then the same server starts again
    new = (bundled_server() if identify(old).version < (7, 4) else None) or old
    server = Server(old, "--appendonly", "yes")
    try:
        job = Job(server.url, namespace)
        with redis.Redis(port=server.port) as admin:
            admin.shutdown()
        assert server.process is not None
        server.process.wait(20)
        server.program = new
        server.start()
        job.check()
        with redrb.connect(server.url) as client:
            assert client.server_version == identify(new).version
    finally:
        server.close()


@pytest.mark.slow
def test_a_replica_that_takes_over_loses_nothing_when_writes_were_paused(namespace: str) -> None:
    watched = Watched(next(iter(programs().values())))
    primary, replica = watched.servers
    try:
        job = Job(watched.url, namespace)
        with (
            redis.Redis(port=primary.port) as old,
            redis.Redis(port=replica.port) as new,
            redis.Redis(port=watched.sentinels[0].port) as sentinel,
        ):
            old.execute_command("CLIENT", "PAUSE", 20_000, "WRITE")
            while offset(old, "master_repl_offset") != offset(new, "slave_repl_offset"):
                time.sleep(0.05)
            sentinel.execute_command("SENTINEL", "FAILOVER", SERVICE)
        while watched.primary() is not replica:
            time.sleep(0.05)
        job.check()
    finally:
        watched.close()


def offset(client: redis.Redis, field: str) -> int:
    """Return how many bytes a server has replicated."""
    found = client.info("replication")
    assert isinstance(found, dict)
    return int(found[field])


class Job:
    """A maker and a trainer, of which half of the groups are trained when it is made."""

    def __init__(self, url: str, namespace: str) -> None:
        self._url, self._namespace = url, namespace
        self._taken: list[int] = []
        halfway, self._on = threading.Event(), threading.Event()
        self._workers = [
            threading.Thread(target=work, args=(halfway,), daemon=True)
            for work in (self._make, self._train)
        ]
        for worker in self._workers:
            worker.start()
        assert halfway.wait(60)

    def check(self) -> None:
        """Check that every group is trained once."""
        self._on.set()
        for worker in self._workers:
            worker.join(60)
        assert sorted(self._taken) == list(range(GROUPS))
        with redrb.connect(self._url) as client:
            stats = redrb.ExperienceStream(client, "math", namespace=self._namespace).stats()
            assert (stats.ledger.put, stats.ledger.acked, stats.returned) == (GROUPS, GROUPS, 0)

    def _make(self, halfway: threading.Event) -> None:
        with redrb.connect(self._url) as client:
            stream = redrb.ExperienceStream(client, "math", namespace=self._namespace, limit=40)
            for number in range(GROUPS):
                if halfway.is_set():  # puts go on during the change
                    self._on.wait(0.02)
                stream.put(numbered(number))

    def _train(self, halfway: threading.Event) -> None:
        with redrb.connect(self._url) as client:
            stream = redrb.ExperienceStream(client, "math", namespace=self._namespace, limit=40)
            while len(self._taken) < GROUPS:
                with stream.take(4, timeout=60) as lease:
                    self._taken += numbers(lease)
                if len(self._taken) >= GROUPS // 2:
                    halfway.set()
