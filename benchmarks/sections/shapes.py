"""Each shape from a producer to a consumer: redrb, the floors, and the peers that are installed."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks.options import Options
from benchmarks.processes import ProcessFailed
from benchmarks.race import Round, Sides, race, ratio, sides, summary
from benchmarks.server import Server, private_server
from benchmarks.shapes import SHAPES
from benchmarks.systems import OURS, versions

QUICK = ("rlhf-1k", "grpo", "agent")

PEER_SHARE = 0.25
"""Size of a peer's round over that of redrb's: a peer takes many times as long."""


def run(options: Options) -> dict[str, Any]:
    """Return the figures of every system in every shape, and redrb's ratios to the others."""
    known = versions()
    found: dict[str, Any] = {}
    with private_server(options.server) as server, sides() as own:
        for shape in QUICK if options.quick else SHAPES:
            failed = {peer for peer in known.keys() - set(OURS) if not _works(server, peer, shape)}
            rounds = _race(
                server, own, [each for each in known if each not in failed], shape, options
            )
            found[shape] = {
                "summary": SHAPES[shape].summary,
                "systems": {system: summary(each) for system, each in rounds.items()},
                "redrb_over": {
                    system: round(ratio(rounds["redrb"], each), 3)
                    for system, each in rounds.items()
                    if system != "redrb"
                },
                "failed": sorted(failed),
            }
    return {"server": server.name, "versions": known, "shapes": found}


def _race(
    server: Server, own: Sides, systems: list[str], shape: str, options: Options
) -> dict[str, list[Round]]:
    """Race systems in one shape; each peer has processes of its own, so that none slows another."""
    with ExitStack() as scope:
        teams = {each: own if each in OURS else scope.enter_context(sides()) for each in systems}
        sizes = {each: options.size * (1 if each in OURS else PEER_SHARE) for each in systems}
        contestants = {
            each: partial(team.run, server, each, shape, size=sizes[each])
            for each, team in teams.items()
        }
        return race(contestants, options.rounds, shape)


def _works(server: Server, peer: str, shape: str) -> bool:
    """Return whether a peer gets through a small round; if not, its traceback is on stderr."""
    try:
        with sides() as team:
            team.run(server, peer, shape, size=0.01)
    except ProcessFailed as error:
        print(f"{peer} cannot do {shape}: {error}")
        server.clear()
        return False
    return True
