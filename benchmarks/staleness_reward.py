"""Reward against time in the demo's task, for several bounds of staleness.

Each run is a `redrb demo` with its own server, two makers and one trainer; the plot shows held-out
reward and the mean staleness of trained samples. Runs follow one another, so that they do not
disturb each other: python -m benchmarks.staleness_reward
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.machine import machine
from benchmarks.plots import PALETTE
from redrb.environment import PREFIX, child_environment

BOUNDS = {"0": 0, "2": 2, "8": 8, "none": -1}
RESULTS = Path(__file__).parent / "results"
NEVER = 2.0
"""A reward that is not reached: each run lasts as long as the others."""


def measure(bound: int, seconds: float, makers: int) -> dict[str, Any]:
    """Run the demo with a bound; return (seconds, reward) and (seconds, mean staleness)."""
    with tempfile.TemporaryDirectory(prefix="redrb-reward-") as directory:
        done = subprocess.run(
            [sys.executable, "-m", "redrb.cli", "demo", "--json", "--out", directory]
            + ["--max-staleness", str(bound), "--max-seconds", str(seconds)]
            + ["--target-reward", str(NEVER), "--makers", str(makers)],
            env=child_environment(without=PREFIX),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = done.stdout + done.stderr
            raise SystemExit(f"the demo ended with status {done.returncode}\n{said}")
        lines = (Path(directory) / "trainer.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    figures = json.loads(done.stdout.splitlines()[-1])
    return {
        "rewards": [
            (round(event["seconds"], 2), round(event["reward"], 4))
            for event in events
            if event["event"] == "evaluation"
        ],
        "staleness": [
            (round(event["seconds"], 2), round(event["staleness_mean"], 2))
            for event in events
            if event["event"] == "step"
        ],
        "expired": figures["ledger"]["expired"],
        **{name: figures[name] for name in ("samples", "trainer_wait_share", "staleness_max")},
    }


def draw(runs: dict[str, Any], path: Path) -> None:
    """Draw reward and staleness against time as a PNG."""
    figure = Figure(figsize=(10, 6.5), dpi=110, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for colour, (bound, run) in zip(PALETTE, runs.items(), strict=False):
        label = f"max_staleness={bound}" if bound != "none" else "no bound"
        above.plot(*zip(*run["rewards"], strict=True), marker="o", ms=3, color=colour, label=label)
        below.plot(*zip(*run["staleness"], strict=True), color=colour, lw=1)
    above.set(ylabel="held-out reward", title="Reward against time in the demo's task")
    above.legend(loc="lower right")
    below.set(
        ylabel="staleness, mean of a step\n(weight versions)", yscale="symlog", ylim=(0, None)
    )
    below.set_xlabel("seconds since training began")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, facecolor="white")


def main() -> None:
    """Measure all bounds, and write staleness_reward.json and .png."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness_reward")
    parser.add_argument("--seconds", type=float, default=75.0, help="of training, for each bound")
    parser.add_argument("--makers", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory to write to")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    runs = {}
    for name, bound in BOUNDS.items():
        runs[name] = measure(bound, options.seconds, options.makers)
        shown = {key: each for key, each in runs[name].items() if not isinstance(each, list)}
        print(f"bound {name}: reward {runs[name]['rewards'][-1][1]}, {shown}", flush=True)
    written = {"run": machine(), "seconds": options.seconds, "runs": runs}
    (options.results / "staleness_reward.json").write_text(json.dumps(written) + "\n")
    draw(runs, options.results / "staleness_reward.png")


if __name__ == "__main__":
    main()
