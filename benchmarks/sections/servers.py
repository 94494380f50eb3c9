"""Every server at hand, with persistence and threads, over TCP and its unix socket."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.options import Options
from benchmarks.race import lasting, race, ratio, sides, summary
from benchmarks.server import APPEND, private_server, programs

SHAPE = "rlhf-1k"
SYSTEMS = ("redrb", "raw")
WAYS = {
    "no persistence": (),
    "AOF everysec": APPEND,
    "two io-threads": ("--io-threads", "2"),
}


def run(options: Options) -> dict[str, Any]:
    """Return the figures of redrb and of the raw floor in `rlhf-1k` for each way."""
    found: list[dict[str, Any]] = []
    with sides() as team:
        for program in programs():
            for way, arguments in WAYS.items():
                with private_server(program, *arguments) as server:
                    for transport in ("TCP", "unix socket"):
                        contestants = {
                            system: lasting(
                                partial(team.run, server, system, SHAPE, unix=transport != "TCP"),
                                options.round_s,
                            )
                            for system in SYSTEMS
                        }
                        title = f"{server.name}, {way}, {transport}"
                        rounds = race(contestants, options.rounds, title)
                        found.append(
                            {
                                "server": server.name,
                                "way": way,
                                "transport": transport,
                                "systems": {name: summary(each) for name, each in rounds.items()},
                                "redrb_over_raw": round(ratio(rounds["redrb"], rounds["raw"]), 3),
                            }
                        )
    return {"shape": SHAPE, "cases": found}
