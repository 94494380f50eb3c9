"""Puts while nobody takes: their rate, their bytes on the wire, and memory in Redis."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

from benchmarks.options import Options
from benchmarks.race import Round, race, ratio, sides, summary
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
                system: partial(team.run, server, system, shape, size=options.size / 2)
                for system in OURS
            }
            contestants["redrb stalest"] = partial(
                team.run, server, "redrb", shape, size=options.size / 2, settings=STALEST
            )
            rounds = race(contestants, options.rounds, f"{shape}, puts")
            packed = _packed_bytes(shape)
            found[shape] = {
                "packed_bytes": round(packed, 1),
                "systems": {
                    name: {
                        **summary(each),
                        "wire_bytes_a_put": round(_beyond(shape, each, packed), 1),
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


def _packed_bytes(shape_name: str) -> float:
    """Return the mean bytes of an encoded sample."""
    shape = SHAPES[shape_name]
    encoded = encode_groups(shape.items(shape.distinct_groups))
    return sum(len(group.blob) for group in encoded) / len(encoded) / shape.group_samples


def _beyond(shape_name: str, rounds: list[Round], packed: float) -> float:
    shape = SHAPES[shape_name]
    samples = shape.group_samples * shape.put_groups
    return median(each.input_bytes / each.samples - packed for each in rounds) * samples
