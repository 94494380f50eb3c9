"""Puts while nobody takes: their rate, their bytes on the wire, and memory in Redis."""

from __future__ import annotations

import itertools
from functools import partial
from statistics import median
from typing import Any

from benchmarks.options import Options
from benchmarks.race import Round, lasting, race, ratio, sides, summary
from benchmarks.sections.orders import STALEST
from benchmarks.server import private_server
from benchmarks.shapes import SHAPES
from benchmarks.systems import OURS
from redrb.codec import encode_groups

QUICK = ("agent",)


def run(options: Options) -> dict[str, Any]:
    """Return the figures of each shape.

    `wire_bytes_a_put` are the bytes of a put beyond its encoded groups; `memory_bytes` the growth
    of the server's memory a sample, `packed_bytes` the encoded sample.
    """
    found: dict[str, Any] = {}
    with private_server(options.server) as server, sides(1, 0) as team:
        for shape in QUICK if options.quick else SHAPES:
            contestants = {
                system: lasting(partial(team.run, server, system, shape), options.round_s / 2)
                for system in OURS
            }
            contestants["redrb stalest"] = lasting(
                partial(team.run, server, "redrb", shape, settings=STALEST), options.round_s / 2
            )
            rounds = race(contestants, options.rounds, f"{shape}, puts")
            sizes = _packed_sizes(shape)
            packed = sum(sizes) / len(sizes) / SHAPES[shape].group_samples
            found[shape] = {
                "packed_bytes": round(packed, 1),
                "systems": {
                    name: {
                        **summary(each),
                        "wire_bytes_a_put": round(_beyond(shape, each, sizes), 1),
                        "memory_bytes": round(
                            median(one.memory_bytes / one.samples for one in each), 1
                        ),
                    }
                    for name, each in rounds.items()
                },
                "redrb_over": {
                    name: round(ratio(rounds["redrb"], each), 3)
                    for name, each in rounds.items()
                    if name != "redrb"
                },
            }
    return {"server": server.name, "shapes": found}


def _packed_sizes(shape_name: str) -> list[int]:
    """Return the bytes of each distinct group, encoded."""
    shape = SHAPES[shape_name]
    return [len(group.blob) for group in encode_groups(shape.items(shape.distinct_groups))]


def _beyond(shape_name: str, rounds: list[Round], sizes: list[int]) -> float:
    """Return the bytes of a put beyond its encoded groups, which the producer repeats in turn."""
    shape = SHAPES[shape_name]

    def of_one(measured: Round) -> float:
        groups = measured.samples // shape.group_samples
        payload = sum(itertools.islice(itertools.cycle(sizes), groups))
        return (measured.input_bytes - payload) / groups * shape.put_groups

    return median(map(of_one, rounds))
