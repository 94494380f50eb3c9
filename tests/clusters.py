"""A Redis Cluster for tests: some primaries on loopback, and slots that move between them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.retry import Retry

from tests.servers import Server, free_port

_SLOT_COUNT = 16384


class Primary(Server):
    """One primary; `restart` keeps its data and its place in the cluster."""

    def __init__(self, program: str, *arguments: str) -> None:
        self.bus = free_port()
        super().__init__(
            program,
            "--cluster-enabled",
            "yes",
            "--cluster-port",
            str(self.bus),
            "--cluster-node-timeout",
            "1000",
            "--appendonly",
            "yes",
            *arguments,
        )

    def run(self, *command: str | int) -> object:
        """Run one command."""
        client = redis.Redis(port=self.port, retry=Retry(NoBackoff(), 0), decode_responses=True)
        with client:
            return client.execute_command(*command)

    @property
    def id(self) -> str:
        return str(self.run("CLUSTER", "MYID"))


class RedisCluster:
    """Primaries with equal parts of the slots; three, unless `size` says otherwise."""

    def __init__(self, program: str, *arguments: str, size: int = 3) -> None:
        self.primaries = [Primary(program, *arguments) for _ in range(size)]
        self.replicas: list[Primary] = []
        first, *others = self.primaries
        for number, primary in enumerate(self.primaries):
            primary.run("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            begin, end = (-(-_SLOT_COUNT * place // size) for place in (number, number + 1))
            primary.run("CLUSTER", "ADDSLOTSRANGE", begin, end - 1)
        for other in others:
            first.run("CLUSTER", "MEET", "127.0.0.1", other.port, other.bus)
        self.wait_until_whole()

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{primary.port}" for primary in self.primaries)
        return f"redis+cluster://{hosts}"

    def add_replicas(self) -> None:
        """Give each primary a replica, and wait until it has the primary's data."""
        self.replicas += [Primary(each.program, *each.arguments[6:]) for each in self.primaries]
        first = self.primaries[0]
        for replica in self.replicas:
            first.run("CLUSTER", "MEET", "127.0.0.1", replica.port, replica.bus)
        self.wait_until_whole()
        deadline = time.monotonic() + 20
        for primary, replica in zip(self.primaries, self.replicas, strict=True):
            replica.run("CLUSTER", "REPLICATE", primary.id)
            while "'master_link_status': 'up'" not in str(replica.run("INFO", "replication")):
                assert time.monotonic() < deadline, replica.run("INFO", "replication")
                time.sleep(0.02)

    def wait_until_whole(self) -> None:
        """Wait until every node knows the others and serves its slots."""
        nodes = [*self.primaries, *self.replicas]
        deadline, size = time.monotonic() + 20, len(nodes)
        for primary in nodes:
            while True:
                info = str(primary.run("CLUSTER", "INFO"))
                if "cluster_state:ok" in info and f"cluster_known_nodes:{size}\r" in info:
                    break
                assert time.monotonic() < deadline, info
                time.sleep(0.02)

    def serving(self, key: str) -> Primary:
        """Return the node that serves a key, as it says itself."""
        for primary in self.primaries:
            ranges = primary.run("CLUSTER", "SLOTS")
            assert isinstance(ranges, list)
            for begin, end, (_, port, *_), *_ in ranges:
                if begin <= key_slot(key.encode()) <= end and port == primary.port:
                    return primary
        raise AssertionError(f"nobody serves {key}")

    @contextmanager
    def moving(self, key: str, to: Primary) -> Iterator[list[str]]:
        """Move the slot of a key to another node; it is moved when the block ends.

        Yields:
            The names of the keys, which are moved one by one after the block.
        """
        slot, source = key_slot(key.encode()), self.serving(key)
        to.run("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
        source.run("CLUSTER", "SETSLOT", slot, "MIGRATING", to.id)
        yield self.keys(source, slot)
        for name in self.keys(source, slot):
            self.migrate(source, to, name)
        for primary in (to, source, *self.primaries):
            primary.run("CLUSTER", "SETSLOT", slot, "NODE", to.id)

    def keys(self, primary: Primary, slot: int) -> list[str]:
        """Return the keys that a node has of a slot."""
        names = primary.run("CLUSTER", "GETKEYSINSLOT", slot, 10_000)
        assert isinstance(names, list)
        return sorted(names)

    def migrate(self, source: Primary, to: Primary, name: str) -> None:
        """Move one key."""
        source.run("MIGRATE", "127.0.0.1", to.port, name, 0, 5000)

    def close(self) -> None:
        for primary in (*self.primaries, *self.replicas):
            primary.close()
