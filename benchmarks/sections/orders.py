"""Orders against fifo, from a producer to a consumer."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.options import Options
from benchmarks.race import lasting, race, ratio, sides, summary
from benchmarks.server import private_server
from redrb.stream.task.settings import SettingArguments

FIFO: SettingArguments = {"order": "fifo"}
STALEST: SettingArguments = {"order": "stalest", "max_staleness": 8}
PRIORITIZED: SettingArguments = {"order": "prioritized", "tags": ["score", "source"]}
ORDERS = {"fifo": FIFO, "stalest": STALEST, "prioritized, two tags": PRIORITIZED}

SHAPES = ("rlhf-1k", "grpo", "agent")
QUICK = ("rlhf-1k",)


def run(options: Options) -> dict[str, Any]:
    """Return the figures of each order, and its ratio to fifo."""
    found: dict[str, Any] = {}
    with private_server(options.server) as server, sides() as team:
        for shape in QUICK if options.quick else SHAPES:
            contestants = {
                name: lasting(
                    partial(team.run, server, "redrb", shape, settings=settings), options.round_s
                )
                for name, settings in ORDERS.items()
            }
            rounds = race(contestants, options.rounds, shape)
            found[shape] = {
                "orders": {name: summary(each) for name, each in rounds.items()},
                "over_fifo": {
                    name: round(ratio(each, rounds["fifo"]), 3) for name, each in rounds.items()
                },
            }
    return {"server": server.name, "shapes": found}
