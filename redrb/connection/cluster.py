"""A Redis Cluster: knows which node serves a slot, and clients follow a slot that moves.

All keys of a task share a hash tag, so they are on one node. While a slot moves, its keys are on
two nodes and a script would see only some of them. So `ASK` is not followed: the old node refuses
the whole request (see `begin_writing` in `redrb/lua/include/task.lua` and `Client.transaction`),
and the client repeats it until the new node has the slot.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import ClusterDownError, MovedError, RedisError
from redis.exceptions import ConnectionError as Broken

from redrb.connection.client import VALUE, Client
from redrb.connection.deadline import Deadline
from redrb.connection.failures import is_transient
from redrb.connection.lending import Connections, refuse_closed
from redrb.connection.transport import Pipeline, Reply
from redrb.connection.url import Endpoint
from redrb.errors import ConfigError

T = TypeVar("T")

Dial: TypeAlias = Callable[[Endpoint], redis.ConnectionPool]

_MOVES = 5
"""How often a request follows its slot without a pause."""


@dataclass(frozen=True, slots=True)
class Node:
    """A server of a cluster."""

    endpoint: Endpoint
    connections: Connections


class Topology:
    """Knows which node serves which slot; safe among threads, and on both sides of a fork.

    It has no lock, which a fork could copy while it is held: threads that ask at the same time get
    the same answer.
    """

    def __init__(self, named: tuple[Endpoint, ...], dial: Dial, timeout: float) -> None:
        """Remember the nodes in the URL; nothing is sent.

        Args:
            dial: Makes the connections to a node.
        """
        self._named = named
        self._dial = dial
        self._timeout = timeout
        self._nodes: dict[Endpoint, Node] = {}
        self._members: tuple[Endpoint, ...] = ()
        self._slots: list[Node | None] = []
        self._suspect: Endpoint | None = None
        self._doubted = True
        self.closed = False

    def serving(self, slot: int) -> Node:
        """Return the node that serves a slot; raises redis-py's exceptions."""
        if self._doubted:
            self.learn()
        node = self._slots[slot]
        if node is None:
            self._doubted = True
            raise ClusterDownError(f"no node of the cluster serves slot {slot}")
        return node

    def primaries(self) -> list[Node]:
        """Return the nodes that serve slots; raises redis-py's exceptions."""
        if self._doubted:
            self.learn()
        return list({node.endpoint: node for node in self._slots if node is not None}.values())

    def doubt(self, slot: int) -> None:
        """Ask again before the next request: the node of this slot may have lost it."""
        self._suspect = self.known(slot)
        self._doubted = True

    def known(self, slot: int) -> Endpoint | None:
        """Return the node that served a slot when the cluster was asked last."""
        node = self._slots[slot] if self._slots else None
        return node.endpoint if node is not None else None

    def follow(self, slot: int, moved: MovedError) -> None:
        """Note the node that a MOVED reply names for a slot."""
        before = self._slots[slot]
        host = moved.host or (before.endpoint[0] if before is not None else "")
        self._slots[slot] = self._node((host, moved.port))

    def learn(self, first: Endpoint | None = None) -> None:
        """Ask the nodes, `first` before the others, which node serves which slot."""
        if self.closed:
            refuse_closed()
        self._doubted = False
        failure: Exception = Broken("Error connecting to any node of the cluster.")
        for endpoint in self._candidates(first):
            try:
                ranges = self._ask(endpoint)
            except (RedisError, OSError) as error:
                failure = error
            else:
                if ranges:
                    self._note(ranges, endpoint[0])
                    return
                failure = ClusterDownError(f"the node {_named(endpoint)} serves no slots yet")
        self._doubted = True
        if isinstance(failure, RedisError):
            raise failure
        raise Broken(f"Error connecting to the cluster. {failure}") from failure

    def close(self) -> None:
        """Close all connections, and lend none from now on."""
        self.closed = self._doubted = True
        for node in list(self._nodes.values()):
            node.connections.close()

    def _candidates(self, first: Endpoint | None) -> list[Endpoint]:
        """Return the nodes to ask; the node that failed comes last."""
        others = {*self._members, *self._named} - {self._suspect, first}
        # in random order: a node that is cut off from the others would answer with old slots
        before = [first] if first is not None else []
        suspect = [self._suspect] if self._suspect is not None else []
        return [*before, *random.sample(sorted(others), len(others)), *suspect]

    def _ask(self, endpoint: Endpoint) -> Reply:
        connection: Any = self._dial(endpoint).make_connection()
        try:
            with Deadline(at_most=self._timeout):
                connection.connect()
                connection.send_command("CLUSTER", "SLOTS")
                return connection.read_response()
        finally:
            connection.disconnect()

    def _note(self, ranges: Reply, asked: str) -> None:
        """Note ranges of slots, each with its primary and the primary's replicas."""
        slots: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        members: set[Endpoint] = set()
        for first, last, *servers in ranges:
            endpoints = [_endpoint(server, asked) for server in servers]
            members.update(endpoints)
            slots[first : last + 1] = [self._node(endpoints[0])] * (last + 1 - first)
        self._members = tuple(members)
        self._slots = slots
        self._nodes = {at: node for at, node in self._nodes.items() if at in members}

    def _node(self, endpoint: Endpoint) -> Node:
        node = self._nodes.get(endpoint)
        if node is None:
            made = Node(endpoint, Connections(self._dial(endpoint)))
            node = self._nodes.setdefault(endpoint, made)
        return node


class Cluster(Client):
    """A client of a Redis Cluster. `at` returns the client for a key's node."""

    def __init__(
        self,
        topology: Topology,
        *,
        where: str,
        url: str,
        server_version: tuple[int, ...],
    ) -> None:
        lender = _ClusterLender(topology, None)
        super().__init__(lender, where=where, url=url, server_version=server_version)
        self.topology = topology
        self._bound: dict[int, Client] = {}

    def at(self, key: str | bytes) -> Client:
        """Return the client for requests on `key` and on other keys of its hash tag."""
        slot: int = key_slot(key.encode() if isinstance(key, str) else key)
        bound = self._bound.get(slot)
        return bound or self._bound.setdefault(slot, _SlotClient(self, slot))

    def _limit(self) -> tuple[str, int]:
        return self.primaries()[0]._limit()  # noqa: SLF001 (of the same class)

    def primaries(self) -> list[Client]:
        """Return a client for each primary; raises StoreUnavailable if no node was reached."""
        clients = [
            Client(
                node.connections,
                where="{}:{}".format(*node.endpoint),
                url=self.url,
                server_version=self.server_version,
            )
            for node in self.retrying(self.topology.primaries)
        ]
        for client in clients:
            client.retry_s = self.retry_s
        return clients


class _SlotClient(Client):
    """A client for the keys of one slot of a cluster, on whichever node it is at the moment."""

    def __init__(self, cluster: Cluster, slot: int) -> None:
        super().__init__(
            _ClusterLender(cluster.topology, slot),
            where=cluster.where,
            url=cluster.url,
            server_version=cluster.server_version,
        )
        self.retry_s, self.min_replicas = cluster.retry_s, cluster.min_replicas
        self._cluster = cluster
        self._slot = slot

    @property
    def node(self) -> str:
        """Host and port of the node that serves the slot, as far as it is known."""
        endpoint = self._cluster.topology.known(self._slot)
        return self.where if endpoint is None else _named(endpoint)

    def check_size(self, nbytes: int, what: str = VALUE, remedy: str = "") -> None:
        """Refuse a value that is too large for the server; the cluster is asked once."""
        self._cluster.check_size(nbytes, what, remedy)

    def at(self, key: str | bytes) -> Client:
        """Return the client for requests on `key`, in any slot."""
        return self._cluster.at(key)

    def primaries(self) -> list[Client]:
        """Return a client for each primary."""
        return self._cluster.primaries()

    def transaction(self, absent: str) -> Pipeline:
        """Begin a transaction that the node refuses as a whole while the slot moves.

        From the begin of a move on, the node refuses commands on keys that it does not have.
        Without this command it would run those on keys that it still has, and refuse the script.
        """
        pipeline = super().transaction(absent)
        pipeline.add("EXISTS", absent)
        return pipeline

    def retrying(self, attempt: Callable[[], T], *, retry_s: float | None = None) -> T:
        """Run `attempt` as any client does, and repeat it at once after a MOVED reply."""
        return super().retrying(lambda: self._followed(attempt), retry_s=retry_s)

    def _followed(self, attempt: Callable[[], T]) -> T:
        topology = self._cluster.topology
        for _ in range(_MOVES):
            try:
                return attempt()
            except MovedError as error:
                topology.follow(self._slot, error.with_traceback(None))
            except RedisError as error:
                if is_transient(error):
                    topology.doubt(self._slot)
                raise
        return attempt()


class _ClusterLender:
    """Lends connections of the node that serves a slot; without a slot it refuses to."""

    def __init__(self, topology: Topology, slot: int | None) -> None:
        self._topology = topology
        self._slot = slot

    @property
    def closed(self) -> bool:
        return self._topology.closed

    def lend(self) -> AbstractContextManager[redis.Connection]:
        if self._slot is None:
            raise ConfigError(
                "on a cluster the node depends on the key: send requests through client.at(key), "
                "or to each of client.primaries()."
            )
        return self._topology.serving(self._slot).connections.lend()

    def renew(self) -> None:
        """Close nothing: `_SlotClient` asks for the node again after each failure."""

    def close(self) -> None:
        self._topology.close()


def _named(endpoint: Endpoint) -> str:
    return f"{endpoint[0]}:{endpoint[1]}"


def _endpoint(server: Reply, asked: str) -> Endpoint:
    """Return host and port; a node that does not know its host is at the host that was asked."""
    host = server[0].decode() if server[0] else ""
    return (asked if host in ("", "?") else host, int(server[1]))
