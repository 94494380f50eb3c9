"""The table of targets beside the figures of the newest results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Results = dict[str, Any]
Figures = dict[str, float]


@dataclass(frozen=True)
class Target:
    """A bound for one or several figures.

    Attributes:
        text: The meaning of the figures.
        bound: "at least" or "at most".
        value: The bound.
        figures: Reads the figures by name from the results of all sections; raises KeyError where
            a section or a case was not run.
    """

    text: str
    bound: Literal["at least", "at most"]
    value: float
    figures: Callable[[Results], Figures]

    def row(self, results: Results) -> str:
        """Return the row of the table."""
        try:
            found = self.figures(results)
        except KeyError:
            found = {}
        shown = ", ".join(f"{name} {figure:.3g}" for name, figure in found.items())
        met = [(figure >= self.value) is (self.bound == "at least") for figure in found.values()]
        verdict = "not measured" if not met else "met" if all(met) else "missed"
        return f"| {self.text} | {self.bound} {self.value:g} | {shown or '-'} | {verdict} |"


def _over(section: str, system: str, *shapes: str) -> Callable[[Results], Figures]:
    """Read redrb's ratio to a system in some shapes; those that did not run are left out."""

    def read(results: Results) -> Figures:
        found = results[section]["shapes"]
        return {name: found[name]["redrb_over"][system] for name in shapes if name in found}

    return read


def _peers(results: Results, *, torchrl: bool) -> Figures:
    """Read redrb's least ratio to each peer."""
    ratios: dict[str, list[float]] = {}
    for shape in results["shapes"]["shapes"].values():
        for system, ratio in shape["redrb_over"].items():
            if system not in ("raw", "packed") and (system == "torchrl") is torchrl:
                ratios.setdefault(system, []).append(ratio)
    return {system: min(found) for system, found in ratios.items()}


def _order(name: str) -> Callable[[Results], Figures]:
    return lambda results: {
        shape: found["over_fifo"][name] for shape, found in results["orders"]["shapes"].items()
    }


def _sixteen_makers(results: Results) -> Figures:
    cases = results["scale"]["makers"]
    return {f"{case['makers']} makers": case["redrb_over_raw"] for case in cases[-1:]}


def _server_cost(results: Results) -> Figures:
    """Read the server's processor time over that of the packed floor."""
    return {
        shape: found["systems"]["redrb"]["server_us"] / found["systems"]["packed"]["server_us"]
        for shape, found in results["shapes"]["shapes"].items()
    }


def _wire(results: Results) -> Figures:
    return {
        shape: found["systems"]["redrb"]["wire_bytes_a_put"]
        for shape, found in results["puts"]["shapes"].items()
    }


def _p99(results: Results) -> Figures:
    return {
        shape: found["redrb"]["p99_ms"] for shape, found in results["latency"]["shapes"].items()
    }


TARGETS = (
    Target(
        "samples/s over the raw floor",
        *("at least", 1.3),
        _over("shapes", "raw", "rlhf-1k", "ragged", "grpo", "long"),
    ),
    Target(
        "puts one at a time over XADD one at a time",
        *("at least", 0.6),
        _over("puts", "raw", "agent"),
    ),
    Target("transitions/s over the raw floor", *("at least", 2.0), _over("shapes", "raw", "tiny")),
    Target("images/s over the raw floor", *("at least", 1.0), _over("shapes", "raw", "vision")),
    Target("stalest with max_staleness over fifo", *("at least", 0.9), _order("stalest")),
    Target("prioritized, two tags, over fifo", *("at least", 0.8), _order("prioritized, two tags")),
    Target("least over torchrl", *("at least", 4.0), lambda found: _peers(found, torchrl=True)),
    Target(
        "least over other peers", *("at least", 6.0), lambda found: _peers(found, torchrl=False)
    ),
    Target("most makers over the raw floor with as many", *("at least", 1.3), _sixteen_makers),
    Target("server's processor time over the packed floor", *("at most", 1.3), _server_cost),
    Target("bytes on the wire of a put beyond its payload", *("at most", 600.0), _wire),
    Target("put to batch at half load, p99, ms", *("at most", 3.0), _p99),
    Target(
        "largest backlog over 1,000 groups, time of a call",
        *("at most", 1.2),
        lambda results: dict(results["backlog"]["over_smallest"]),
    ),
)


def load(directory: Path) -> Results:
    """Read the results of all sections that a directory has."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}


def report(results: Results) -> str:
    """Return the table, as Markdown."""
    rows = [target.row(results) for target in TARGETS]
    return "\n".join(["| figure | target | measured | |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    print(report(load(Path(__file__).parent / "results")))
