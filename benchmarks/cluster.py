"""Private clusters on loopback for benchmarks."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import redis

from benchmarks.server import Server, private_server

SLOTS = 16384
START_S = 20.0


@dataclass(frozen=True)
class Cluster:
    """A cluster that runs.

    Attributes:
        nodes: Its primaries, each with an equal part of the slots.
        url: The URL of all.
    """

    nodes: list[Server]
    url: str

    def processor_s(self) -> list[float]:
        """Return the processor seconds that each node has used."""
        return [node.info()["server_s"] for node in self.nodes]


@contextmanager
def private_cluster(program: str | None, size: int) -> Iterator[Cluster]:
    """Start a cluster of `size` primaries without persistence."""
    with ExitStack() as scope:
        buses = [_free_port() for _ in range(size)]
        nodes = [
            scope.enter_context(
                private_server(program, "--cluster-enabled", "yes", "--cluster-port", str(bus))
            )
            for bus in buses
        ]
        clients: list[Any] = [scope.enter_context(redis.Redis.from_url(node.url)) for node in nodes]
        for number, client in enumerate(clients):
            first, end = (-(-SLOTS * place // size) for place in (number, number + 1))
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        ports = [client.connection_pool.connection_kwargs["port"] for client in clients]
        for port, bus in zip(ports[1:], buses[1:], strict=True):
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus)
        for client in clients:
            _wait_until_whole(client, size)
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        yield Cluster(nodes, f"redis+cluster://{hosts}")


def _wait_until_whole(client: Any, size: int) -> None:
    until = time.monotonic() + START_S
    while True:
        info = client.execute_command("CLUSTER", "INFO")
        text = info.decode() if isinstance(info, bytes) else str(info)
        if "cluster_state:ok" in text and f"cluster_known_nodes:{size}\r" in text:
            return
        if time.monotonic() > until:
            raise SystemExit(f"the cluster did not start:\n{text}")
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
