"""From put to batch at half load: how long a trainer waits for what a maker has put."""

from __future__ import annotations

import uuid
from multiprocessing import get_context
from statistics import median
from typing import Any

from benchmarks.options import Options
from benchmarks.paced import Paced, percentile
from benchmarks.processes import Worker, started
from benchmarks.server import Server, private_server

SHAPES = ("rlhf-1k", "grpo", "agent")
SYSTEMS = ("redrb", "raw")
PUTS = 2_000
"""Puts of a round."""

Times = tuple[list[float], list[float]]


def run(options: Options) -> dict[str, Any]:
    """Return percentiles of the time from put to batch, in milliseconds.

    A take is as large as a put. The rate is half of what the same two processes reach without
    pauses. Times begin when a put is called; those of `due` begin when it was to be called, so that
    they also hold the time for which an earlier put or the machine held it up.
    """
    found: dict[str, Any] = {}
    barrier = get_context("spawn").Barrier(2)
    with (
        private_server(options.server) as server,
        started([lambda: Worker(Paced, barrier)] * 2) as (maker, trainer),
    ):
        for shape in SHAPES[: 1 if options.quick else 3]:
            found[shape] = _shape(server, maker, trainer, shape, options)
    return {"server": server.name, "shapes": found}


def _shape(
    server: Server, maker: Worker, trainer: Worker, shape: str, options: Options
) -> dict[str, Any]:
    """Measure both systems in turn: first without pauses, then at half of that rate."""
    rates: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    times: dict[str, list[Times]] = {system: [] for system in SYSTEMS}
    puts = max(100, round(PUTS * options.size))

    def one(system: str, period_s: float) -> tuple[float, Times]:
        key = f"latency-{uuid.uuid4().hex}"
        trainer.ask("take", system, server.url, key, shape, puts)
        maker.ask("put", system, server.url, key, shape, puts, period_s)
        due, called = maker.result()
        held = trainer.result()
        server.clear()
        waits = ([at - put for at, put in zip(held, start, strict=True)] for start in (called, due))
        return puts / (held[-1] - called[0]), (next(waits), next(waits))

    for _ in range(options.rounds):
        for system in SYSTEMS:
            rates[system].append(one(system, 0.0)[0])
    for _ in range(options.rounds):
        for system in SYSTEMS:
            times[system].append(one(system, 2 / median(rates[system]))[1])
    figures = {
        system: {"puts_per_s": round(median(rates[system]) / 2, 1), **_percentiles(times[system])}
        for system in SYSTEMS
    }
    p99 = {system: figures[system]["p99_ms"] for system in SYSTEMS}
    print(f"{shape}, put to batch: " + ", ".join(f"{k} p99 {v} ms" for k, v in p99.items()))
    return figures


def _percentiles(rounds: list[Times]) -> dict[str, Any]:
    called = [wait for waits, _ in rounds for wait in waits]
    due = [wait for _, waits in rounds for wait in waits]
    by_round = [percentile(waits, 0.99) for waits, _ in rounds]
    return {
        "p50_ms": _ms(percentile(called, 0.5)),
        "p99_ms": _ms(median(by_round)),
        "p99_ms_least": _ms(min(by_round)),
        "p99_ms_most": _ms(max(by_round)),
        "p999_ms": _ms(percentile(called, 0.999)),
        "p99_ms_due": _ms(percentile(due, 0.99)),
        "percentiles_ms": [_ms(percentile(called, share / 1000)) for share in range(10, 1000, 10)],
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
