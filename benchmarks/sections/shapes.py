"""Each shape from a producer to a consumer: redrb, the floors, and the peers that are installed."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks.options import Options
from benchmarks.race import lasting, race, ratio, sides, summary
from benchmarks.server import private_server
from benchmarks.shapes import SHAPES
from benchmarks.systems import OURS, PEERS, versions

QUICK = ("rlhf-1k", "grpo", "agent")


def run(options: Options) -> dict[str, Any]:
    """Return the figures of every system in every shape, and redrb's ratios to the others.

    The peers that could not do a shape are in its `failed`.
    """
    known = versions()
    found: dict[str, Any] = {}
    with private_server(options.server) as server, ExitStack() as scope:
        own = scope.enter_context(sides())
        # Each peer has processes of its own, so that none slows another.
        teams = {each: own if each in OURS else scope.enter_context(sides()) for each in known}
        for shape in QUICK if options.quick else SHAPES:
            contestants = {
                system: lasting(partial(team.run, server, system, shape), options.round_s)
                for system, team in teams.items()
            }
            rounds = race(contestants, options.rounds, shape, may_fail=PEERS)
            found[shape] = {
                "summary": SHAPES[shape].summary,
                "systems": {system: summary(each) for system, each in rounds.items()},
                "redrb_over": {
                    system: round(ratio(rounds["redrb"], each), 3)
                    for system, each in rounds.items()
                    if system != "redrb"
                },
                "failed": sorted(known.keys() - rounds.keys()),
            }
    return {"server": server.name, "versions": known, "shapes": found}
