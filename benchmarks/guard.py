"""Fails where redrb has lost more than a fifth of its lead over the raw floor.

A ratio is the processor time that the raw floor spends on a sample, in all processes, over the one
that redrb spends; the two alternate in one run. Where two cores serve three processes, processor
time is what limits the rate. It depends less than the rate on what else the machine does, but a
virtual machine changes its speed by up to a factor of two, several times a second: the rounds are
short, so that both sides of a pair meet the same speed, and many. The medians over all pairs are
compared with the ratios in `guard.json`; one that has fallen is measured again before it counts.
How large a lead is depends on the processor (docs/reference/performance.md), so the file has the
ratios of each model that they were written on, and "other" for those that it does not know.
`--write` measures with more rounds and writes those of this model anew.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.machine import processor
from benchmarks.race import Round, Sides, race, sides
from benchmarks.server import Server, private_server
from redrb.codec.kernels import NAME

RATIOS = Path(__file__).parent / "guard.json"
ALLOWED_LOSS = 0.2
ATTEMPTS = 3
ROUNDS, ROUNDS_TO_WRITE = 31, 101
SIZES = {"rlhf-1k": 0.05, "grpo": 0.05, "agent": 0.1}
"""Share of a full round: about a tenth of a second."""

WITH_CONSUMER = ("rlhf-1k", "grpo")
PUTS_ONLY = ("agent",)


def cost(measured: Round) -> float:
    """Return the processor time of a sample, in all processes."""
    spent = measured.producer_s + measured.consumer_s + measured.server_s
    return spent / measured.samples


def ratios_of(
    server: Server, teams: dict[str, Sides], shapes: Iterable[str], rounds: int
) -> dict[str, float]:
    """Return the floor's processor time over redrb's in each of the shapes."""
    found = {}
    for shape in shapes:
        contestants = {
            system: partial(teams[shape].run, server, system, shape, size=SIZES[shape])
            for system in ("raw", "redrb")
        }
        raced = race(contestants, rounds, shape)
        pairs = zip(raced["raw"], raced["redrb"], strict=True)
        found[shape] = round(median(cost(raw) / cost(ours) for raw, ours in pairs), 3)
    return found


def lost(expected: dict[str, float], found: dict[str, float]) -> list[str]:
    """Return the shapes whose ratio has fallen too far."""
    return [shape for shape, ratio in found.items() if ratio < expected[shape] * (1 - ALLOWED_LOSS)]


def main() -> None:
    """Compare with the file, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the ratios measured now")
    write = parser.parse_args().write
    if NAME != "compiled":
        raise SystemExit("the codec's compiled kernel is missing or older than its source: install")
    with private_server() as server, sides() as both, sides(1, 0) as puts_only:
        teams = {**dict.fromkeys(WITH_CONSUMER, both), **dict.fromkeys(PUTS_ONLY, puts_only)}
        known: dict[str, dict[str, float]] = json.loads(RATIOS.read_text())
        if write:
            known[processor()] = ratios_of(server, teams, teams, ROUNDS_TO_WRITE)
            RATIOS.write_text(json.dumps(known, indent=1) + "\n")
            print(known[processor()])
            return
        expected = known.get(processor()) or known["other"]
        doubtful = list(teams)
        for _ in range(ATTEMPTS):
            found = ratios_of(server, teams, doubtful, ROUNDS)
            for shape, ratio in found.items():
                print(f"{shape}: {ratio} times the floor's speed; guard.json: {expected[shape]}")
            doubtful = lost(expected, found)
            if not doubtful:
                return
    raise SystemExit(
        f"redrb has become slower in {', '.join(doubtful)}: make it fast again, or accept it "
        "with `python -m benchmarks.guard --write`."
    )


if __name__ == "__main__":
    main()
