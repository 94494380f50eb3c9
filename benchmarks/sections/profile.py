"""Where the processor time of a group goes: the server's by part, the codec's share of the rest."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

from benchmarks.options import Options
from benchmarks.race import Round, lasting, race, sides
from benchmarks.server import private_server
from benchmarks.shapes import SHAPES
from redrb.codec import GroupLayout, decode_batch, encode_groups, parse_groups

SYSTEMS = ("redrb", "packed")
QUICK = ("agent",)

SENT = {"xadd", "xreadgroup", "xack", "xdel", "multi", "exec", "evalsha", "eval", "blpop"}
"""Commands that clients send in a round; scripts of redrb call the others, XACK and XDEL."""

FROM_SCRIPTS = {"xack", "xdel"}

NOT_MEASURED = {"info", "flushall", "config|resetstat"}
"""Commands of the benchmark itself."""

Parts = dict[str, float]


def run(options: Options) -> dict[str, Any]:
    """Return microseconds of processor time a group, by shape and system.

    `server` has the parts of the server's time. `kernel`: reading and writing sockets. `sent`:
    commands that clients send, such as XADD, without the scripts. `called`: commands that scripts
    call. `lua`: the scripts themselves. `rest`: reading and writing the protocol, waiting for
    events. `producer` and `consumer` are the whole time of the processes; `encode` and `decode`
    are the codec's part of it in redrb, measured in this process.

    The server counts the time of commands with a clock and not in processor time, so on a busy
    machine `sent`, `called` and `lua` are too large, and `rest` is too small.
    """
    found: dict[str, Any] = {}
    with private_server(options.server) as server, sides() as team:
        for shape in QUICK if options.quick else SHAPES:
            commands: dict[str, list[Parts]] = {system: [] for system in SYSTEMS}

            def one(system: str, *, size: float, shape: str = shape, kept: Any = commands) -> Round:
                server.commands()
                measured = team.run(server, system, shape, size=size)
                kept[system].append(server.commands())
                return measured

            contestants = {
                system: lasting(partial(one, system), options.round_s) for system in SYSTEMS
            }
            rounds = race(contestants, options.rounds, f"{shape}, profile")
            found[shape] = {
                "systems": {
                    system: _medians(
                        [
                            _parts(system, shape, *each)
                            for each in zip(
                                measured, commands[system][-options.rounds :], strict=True
                            )
                        ]
                    )
                    for system, measured in rounds.items()
                },
                **_codec(shape, options.rounds),
            }
    return {"server": server.name, "shapes": found}


def _parts(system: str, shape: str, measured: Round, commands: Parts) -> Parts:
    """Return the microseconds of a group, by part."""
    groups = measured.samples / SHAPES[shape].group_samples
    own = {name: spent for name, spent in commands.items() if name not in NOT_MEASURED}
    by_clients = SENT - (FROM_SCRIPTS if system == "redrb" else set())
    scripts = own.pop("evalsha", 0.0) + own.pop("eval", 0.0)
    outer = own.pop("exec", 0.0)
    sent = sum(spent for name, spent in own.items() if name in by_clients)
    called = sum(spent for name, spent in own.items() if name not in by_clients)
    queued = sent + scripts if outer else 0.0
    seconds = {
        "kernel": measured.server_kernel_s,
        "sent": sent + max(outer - queued, 0.0),
        "called": called,
        "lua": max(scripts - called, 0.0),
    }
    seconds["rest"] = max(measured.server_s - sum(seconds.values()), 0.0)
    seconds |= {
        "server": measured.server_s,
        "producer": measured.producer_s,
        "consumer": measured.consumer_s,
    }
    return {name: spent / groups * 1e6 for name, spent in seconds.items()}


def _medians(rounds: list[Parts]) -> Parts:
    return {name: round(median(each[name] for each in rounds), 1) for name in rounds[0]}


def _codec(shape_name: str, rounds: int) -> Parts:
    """Return the microseconds that encoding and decoding a group take, as puts and takes do it."""
    shape = SHAPES[shape_name]
    groups = shape.items(shape.take_groups)
    puts = [groups[at : at + shape.put_groups] for at in range(0, len(groups), shape.put_groups)]
    blobs = [group.blob for put in puts for group in encode_groups(put)]
    spent: dict[str, list[float]] = {"encode": [], "decode": []}
    for _ in range(max(rounds, 5) * 4):
        start = time.process_time()
        for put in puts:
            encode_groups(put)
        middle = time.process_time()
        decode_batch([layout for layout in parse_groups(blobs) if isinstance(layout, GroupLayout)])
        spent["encode"].append(middle - start)
        spent["decode"].append(time.process_time() - middle)
    return {name: round(median(each) / len(groups) * 1e6, 1) for name, each in spent.items()}
