"""redrb against raw redis-py and other systems: one command, all figures.

Contestants alternate in one run; figures are medians of the rounds, ratios medians of the ratios of
rounds that ran one after the other. Each section writes RESULTS/SECTION.json and .png; the end is a
table of targets and figures. `--quick` shows within two minutes that everything runs, and its
figures mean little.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import disturbed, machine
from benchmarks.options import ROUND_S, Options
from benchmarks.plots import draw
from benchmarks.report import load, report
from benchmarks.sections import (
    backlog,
    engines,
    gateway,
    latency,
    observing,
    orders,
    profile,
    puts,
    replicas,
    scale,
    servers,
    shapes,
    shards,
    staleness,
)

RESULTS = Path(__file__).parent / "results"
QUICK_SIZE, QUICK_ROUNDS = 0.05, 2

SECTIONS: dict[str, Callable[[Options], dict[str, Any]]] = {
    "shapes": shapes.run,
    "puts": puts.run,
    "orders": orders.run,
    "servers": servers.run,
    "scale": scale.run,
    "latency": latency.run,
    "backlog": backlog.run,
    "profile": profile.run,
    "shards": shards.run,
    "replicas": replicas.run,
    "observing": observing.run,
    "staleness": staleness.run,
    "gateway": gateway.run,
    "engines": engines.run,
}


def measure(names: list[str], options: Options, results: Path) -> None:
    """Run sections; each writes its JSON and its plot when it is done."""
    results.mkdir(parents=True, exist_ok=True)
    for name in names:
        print(f"== {name}", flush=True)
        if name == "engines" and options.vllm is None:
            print("left out: it needs --vllm FOLDER with bin/vllm, redrb beside it, and model")
            continue
        about = {**machine(), "rounds": options.rounds, "size": options.size}
        warning = disturbed(name, about)
        if warning:
            print(warning, flush=True)
        began = time.monotonic()
        figures = SECTIONS[name](options)
        about["seconds"] = round(time.monotonic() - began)
        written = json.dumps({"run": about, **figures}, indent=1)
        (results / f"{name}.json").write_text(written + "\n")
        draw(name, figures, results / f"{name}.png")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", help=f"sections, separated by commas: {', '.join(SECTIONS)}")
    parser.add_argument("--rounds", type=int, help="timed rounds of each contestant; default 5")
    parser.add_argument("--size", type=float, help=f"share of a round of {ROUND_S:g} s; default 1")
    parser.add_argument("--server", help="path of a redis-server; default: the one on PATH")
    parser.add_argument("--quick", action="store_true", help="few small cases; writes to quick/")
    parser.add_argument(
        "--vllm",
        type=Path,
        help="folder with bin/vllm, redrb beside it, and model: for engines",
    )
    parser.add_argument("--results", type=Path, help="directory to write to")
    options = parser.parse_args()
    options.only = options.only.split(",") if options.only else list(SECTIONS)
    unknown = set(options.only) - SECTIONS.keys()
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    return options


def main() -> None:
    """Run the chosen sections, and print all results at hand beside their targets."""
    given = arguments()
    options = Options(
        rounds=given.rounds or (QUICK_ROUNDS if given.quick else Options.rounds),
        size=given.size or (QUICK_SIZE if given.quick else Options.size),
        server=given.server,
        quick=given.quick,
        vllm=given.vllm and given.vllm.absolute(),
    )
    results = given.results or (RESULTS / "quick" if given.quick else RESULTS)
    measure(given.only, options, results)
    print(report(load(results)))


if __name__ == "__main__":
    main()
