"""More makers, more trainers, more tasks, and clients that do next to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks.idle_clients import idle_clients
from benchmarks.options import Options
from benchmarks.race import Round, lasting, race, ratio, sides, summary
from benchmarks.server import Server, private_server

SHAPE = "rlhf-1k"
MAKERS = (1, 2, 4, 8, 16, 64)
TRAINERS = (1, 2, 4)
TASKS = (1, 4, 16, 64)
IDLE = (1_000, 10_000)


def run(options: Options) -> dict[str, Any]:
    """Return the figures of redrb, and of the raw floor where it can do the same."""
    quick = options.quick
    with private_server(options.server, "--maxclients", "20000") as server:
        return {
            "server": server.name,
            "shape": SHAPE,
            "makers": _processes(server, options, [(n, 1) for n in MAKERS[: 2 if quick else 6]]),
            "trainers": _processes(
                server, options, [(2, n) for n in TRAINERS[: 1 if quick else 3]]
            ),
            "tasks": _tasks(server, options, TASKS[: 2 if quick else 4]),
            "idle_clients": _idle(server, options, (100,) if quick else IDLE),
        }


def _processes(
    server: Server, options: Options, counts: Sequence[tuple[int, int]]
) -> list[dict[str, Any]]:
    """Race redrb and the raw floor with each number of makers and trainers."""
    found = []
    for makers, trainers in counts:
        with sides(makers, trainers) as team:
            contestants = {
                system: lasting(partial(team.run, server, system, SHAPE), options.round_s)
                for system in ("redrb", "raw")
            }
            rounds = race(contestants, options.rounds, f"{makers} makers, {trainers} trainers")
        found.append({"makers": makers, "trainers": trainers, **_against_raw(rounds)})
    return found


def _tasks(server: Server, options: Options, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Race one maker and one trainer that go through so many tasks in turn."""
    with sides() as team:
        contestants = {
            str(tasks): lasting(
                partial(team.run, server, "redrb", SHAPE, tasks=tasks), options.round_s
            )
            for tasks in counts
        }
        rounds = race(contestants, options.rounds, "tasks")
    return [
        {
            "tasks": int(tasks),
            "redrb": summary(each),
            "over_one": round(ratio(each, rounds["1"]), 3),
        }
        for tasks, each in rounds.items()
    ]


def _idle(server: Server, options: Options, counts: Sequence[int]) -> dict[str, Any]:
    """Run the same rounds without and with clients that do next to nothing.

    `memory_bytes` is the server's memory for each of them.
    """
    found = {}
    for clients in (0, *counts):
        with ExitStack() as scope:
            team = scope.enter_context(sides())
            before = server.info()["memory_bytes"]
            if clients:
                scope.enter_context(idle_clients(server.url, clients))
            grown = server.info()["memory_bytes"] - before
            contestants = {
                system: lasting(partial(team.run, server, system, SHAPE), options.round_s)
                for system in ("redrb", "raw")
            }
            rounds = race(contestants, options.rounds, f"{clients} idle clients")
        memory = round(grown / clients) if clients else 0
        found[str(clients)] = {**_against_raw(rounds), "memory_bytes": memory}
    return found


def _against_raw(rounds: dict[str, list[Round]]) -> dict[str, Any]:
    return {
        "systems": {name: summary(each) for name, each in rounds.items()},
        "redrb_over_raw": round(ratio(rounds["redrb"], rounds["raw"]), 3),
    }
