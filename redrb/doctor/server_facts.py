"""What INFO says of a server: allocator, fragmentation, forks, connections; slots of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from redrb.connection import Client
from redrb.connection.cluster import Cluster
from redrb.connection.server_cli import cli_options
from redrb.state.findings.wording import finding_of, place_of, server_command
from redrb.state.model import Finding, ServerState
from redrb.state.reader import figure_of, info_fields, server_state

LONG_FORK_US = 500_000
FRAGMENTED = 1.8
LEAST_BYTES = 100_000_000
NEAR_MOST_CLIENTS = 0.9
SLOTS = 16_384


def info_of(client: Client) -> dict[str, str]:
    """Return the fields of INFO of one server."""
    return info_fields(client.execute("INFO"))


def server_of(client: Client, info: Mapping[str, str]) -> ServerState:
    """Return the state of a server, as commands for it need."""
    return server_state(info, address=place_of(client.where), cli=cli_options(client))


def find(server: ServerState, info: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings of one server's INFO."""
    subject = f"server {server.address}"
    fork_us = figure_of(info, "latest_fork_usec")
    if fork_us >= LONG_FORK_US:
        text = f"The last fork took {fork_us / 1e6:.2f} s."
        command = "cat /sys/kernel/mm/transparent_hugepage/enabled"
        yield finding_of("long-fork", subject, text, command)
    used, resident = server.used_memory, figure_of(info, "used_memory_rss")
    if used >= LEAST_BYTES and resident >= FRAGMENTED * used:
        text = f"It holds {resident / 1e6:,.0f} MB for {used / 1e6:,.0f} MB of data."
        command = server_command(server, "MEMORY", "PURGE")
        yield finding_of("fragmented-memory", subject, text, command)
    if server.allocator.startswith("libc"):
        command = server_command(server, "INFO", "memory")
        yield finding_of("libc-allocator", subject, "Its allocator is libc's.", command)
    most = figure_of(info, "maxclients")
    if most and server.clients >= NEAR_MOST_CLIENTS * most:
        text = f"{server.clients:,} of at most {most:,.0f} connections are open."
        command = server_command(server, "CONFIG", "SET", "maxclients", f"{2 * most:.0f}")
        yield finding_of("many-clients", subject, text, command)


def find_in_cluster(client: Client) -> Iterator[Finding]:
    """Yield the findings about a cluster's slots."""
    if not isinstance(client, Cluster):
        return
    nodes = client.primaries()  # a node may not know yet what another one has lost
    served = min(
        sum(last - begin + 1 for begin, last, *_ in node.execute("CLUSTER", "SLOTS"))
        for node in nodes
    )
    if served < SLOTS:
        text = f"{SLOTS - served:,} of {SLOTS:,} slots are served by no node."
        command = server_command(server_of(nodes[0], {}), "CLUSTER", "NODES")
        yield finding_of("missing-slots", f"cluster {client.where}", text, command)
