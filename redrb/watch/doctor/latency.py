"""`Ping`: how fast a server answers, and how far its clock is from this machine's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from redrb.connection import Client
from redrb.connection.server_cli import cli_options
from redrb.watch.state.findings.wording import finding_of, place_of, server_finding
from redrb.watch.state.model import Finding, ServerState

PINGS = 5
SLOW_S = 0.02
SPIKE_S = 0.5
SKEW_S = 5.0


@dataclass(frozen=True, slots=True)
class Ping:
    """The replies of a server to a few small requests.

    Attributes:
        skew_s: Seconds by which the server's clock is ahead of this machine's.
        cli: Options with which redis-cli reaches the server.
    """

    server: str
    median_s: float
    worst_s: float
    skew_s: float
    cli: tuple[str, ...] = ()


def ping(client: Client) -> Ping:
    """Send a few requests to one server."""
    times, skews = [], []
    for _ in range(PINGS):
        began, wall = time.perf_counter(), time.time()
        seconds, microseconds = client.execute("TIME")
        times.append(time.perf_counter() - began)
        skews.append(int(seconds) + int(microseconds) / 1e6 - wall - times[-1] / 2)
    return Ping(
        place_of(client.where),
        median_s=statistics.median(times),
        worst_s=max(times),
        skew_s=statistics.median(skews),
        cli=cli_options(client),
    )


def find(pings: Sequence[Ping]) -> Iterator[Finding]:
    """Yield the findings about links and clocks."""
    for one in pings:
        server = ServerState(one.server, cli=one.cli)
        text = f"Median of {PINGS} replies {one.median_s * 1e3:,.1f} ms, the slowest "
        text += f"{one.worst_s * 1e3:,.1f} ms."
        if one.median_s >= SLOW_S:
            yield server_finding("slow-link", server, text, "--latency")
        elif one.worst_s >= SPIKE_S:
            yield server_finding("latency-spikes", server, text, "LATENCY", "DOCTOR")
        if abs(one.skew_s) >= SKEW_S:
            side = "ahead of" if one.skew_s > 0 else "behind"
            text = f"Its clock is {abs(one.skew_s):,.1f} s {side} this machine's."
            yield finding_of("clock-skew", f"server {one.server}", text, "timedatectl status")
