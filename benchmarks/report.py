"""The table of targets beside the figures of the newest results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.machine import disturbed
from benchmarks.shapes import SHAPES
from benchmarks.systems import AFTER_A_TAKE, PEERS

Results = dict[str, Any]
Figures = dict[str, float]


@dataclass(frozen=True)
class Target:
    """A bound for one or several figures.

    Attributes:
        text: The meaning of the figures.
        bound: "at least" or "at most"; None: the figures have no target.
        value: The bound.
        figures: Reads the figures by name from the results of all sections; raises KeyError where
            a section or a case was not run.
    """

    text: str
    bound: Literal["at least", "at most"] | None
    value: float
    figures: Callable[[Results], Figures]

    def row(self, results: Results) -> str:
        """Return the row of the table."""
        try:
            found = self.figures(results)
        except KeyError:
            found = {}
        bound = f"{self.bound} {_written(self.value)}" if self.bound else "-"
        shown = [
            ", ".join(
                f"{name} {_written(figure)}"
                for name, figure in found.items()
                if self._met(figure) is met
            )
            for met in (True, False)
        ]
        cells = [self.text, bound, *([each or "-" for each in shown] if found else ["?", "?"])]
        return f"| {' | '.join(cells)} |"

    def _met(self, figure: float) -> bool:
        return figure <= self.value if self.bound == "at most" else figure >= self.value


def _written(figure: float) -> str:
    """Write a number with three digits, or with all of its whole part."""
    return f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:.3g}"


def _over(section: str, system: str, *shapes: str) -> Callable[[Results], Figures]:
    """Read redrb's ratio to a system in some shapes; those that did not run are left out."""

    def read(results: Results) -> Figures:
        found = results[section]["shapes"]
        ratios = {name: found[name]["redrb_over"] for name in shapes if name in found}
        return {name: each[system] for name, each in ratios.items() if system in each}

    return read


def peer_target(system: str) -> float:
    """Return the least ratio of redrb's rate to a peer's that is aimed at."""
    return 4.0 if system == "torchrl" else 6.0


def _peer(system: str) -> Target:
    """Return the target of redrb's ratio to a peer in every shape that the peer can do."""
    least = peer_target(system)
    return Target(f"samples/s over {system}", "at least", least, _over("shapes", system, *SHAPES))


def _order(name: str) -> Callable[[Results], Figures]:
    return lambda results: {
        shape: found["over_fifo"][name] for shape, found in results["orders"]["shapes"].items()
    }


def _most_makers(results: Results) -> Figures:
    cases = results["scale"]["makers"]
    return {f"{case['makers']} makers": case["redrb_over_raw"] for case in cases[-1:]}


def _server_cost(results: Results) -> Figures:
    """Read the server's processor time over that of the packed floor."""
    return {
        shape: found["systems"]["redrb"]["server_us"] / found["systems"]["packed"]["server_us"]
        for shape, found in results["shapes"]["shapes"].items()
    }


def _wire(results: Results, *, one_group: bool) -> Figures:
    """Read the bytes of a put, of the shapes that put one group at a time or of the others."""
    return {
        shape if one_group else f"{shape} ({SHAPES[shape].put_groups} groups)": found["systems"][
            "redrb"
        ]["wire_bytes_a_put"]
        for shape, found in results["puts"]["shapes"].items()
        if (SHAPES[shape].put_groups == 1) is one_group
    }


def _p99(results: Results) -> Figures:
    return {
        shape: found["redrb"]["p99_ms"] for shape, found in results["latency"]["shapes"].items()
    }


def _observed(results: Results) -> Figures:
    groups = results["observing"]["consumer_groups"]
    return {f"{name} consumer groups": found["percent_of_a_core"] for name, found in groups.items()}


def _admitted(field: str, *cases: str) -> Callable[[Results], Figures]:
    """Read a figure of the jobs with admission, all of them or some."""

    def read(results: Results) -> Figures:
        jobs = results["staleness"]["jobs"]
        return {case: jobs[case]["admission"][field] for case in cases or jobs}

    return read


TARGETS = (
    Target(
        "samples/s over the raw floor",
        "at least",
        1.3,
        _over("shapes", "raw", "rlhf-1k", "ragged", "grpo", "long"),
    ),
    Target(
        "puts one at a time over XADD one at a time",
        "at least",
        0.6,
        _over("puts", "raw", "agent"),
    ),
    Target("transitions/s over the raw floor", "at least", 2.0, _over("shapes", "raw", "tiny")),
    Target("images/s over the raw floor", "at least", 1.0, _over("shapes", "raw", "vision")),
    Target("stalest with max_staleness over fifo", "at least", 0.9, _order("stalest")),
    Target("prioritized, two tags, over fifo", "at least", 0.8, _order("prioritized, two tags")),
    *map(_peer, PEERS),
    Target("most makers over the raw floor with as many", "at least", 1.3, _most_makers),
    Target("server's processor time over the packed floor", "at most", 1.3, _server_cost),
    Target(
        "bytes on the wire of a put of one group, beyond its payload",
        "at most",
        600.0,
        lambda found: _wire(found, one_group=True),
    ),
    Target(
        "the same, puts of several groups",
        None,
        0.0,
        lambda found: _wire(found, one_group=False),
    ),
    Target("put to batch at half load, p99, ms", "at most", 3.0, _p99),
    Target(
        "server's processor time for 20 observers, percent of a core",
        "at most",
        1.0,
        _observed,
    ),
    Target(
        "largest backlog over 1,000 groups, time of a call",
        "at most",
        1.2,
        lambda results: dict(results["backlog"]["over_smallest"]),
    ),
    Target("groups discarded with admission", "at most", 0.0, _admitted("discarded_share")),
    Target(
        "the trainer's idle time with admission, beyond that without a bound",
        "at most",
        0.03,
        _admitted("idle_beyond_no_bound", "trainer-bound", "maker-bound"),
    ),
    Target(
        "Kolmogorov-Smirnov distance with admission, over that by chance",
        "at most",
        1.0,
        lambda results: {
            case: jobs["admission"]["ks_distance"] / jobs["admission"]["ks_critical"]
            for case, jobs in results["staleness"]["jobs"].items()
        },
    ),
    Target(
        "server's time with 1,000 waiting makers, over that with 10",
        "at most",
        1.2,
        lambda results: {
            kind: found["1000"] / found["10"]
            for kind, found in results["staleness"]["server_us"].items()
        },
    ),
)


def load(directory: Path) -> Results:
    """Read the results of all sections that a directory has."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}


def report(results: Results) -> str:
    """Return the table of targets, as Markdown, and the remarks that belong to it."""
    rows = [target.row(results) for target in TARGETS]
    table = ["| figure | target | meets it | misses it |", "|---|---|---|---|", *rows]
    return "\n".join([*table, "", *_remarks(results)])


def _remarks(results: Results) -> list[str]:
    """Return what a reader of the figures has to know about the sections that were run."""
    shapes = results.get("shapes", {})
    taken = {system: AFTER_A_TAKE[system] for system in shapes.get("versions", ())}
    warnings = [disturbed(name, found["run"]) for name, found in results.items()]
    return [
        *(f"- {system}, a batch after its take: {done}" for system, done in taken.items()),
        *(
            f"- {', '.join(found['failed'])} failed in {shape}"
            for shape, found in shapes.get("shapes", {}).items()
            if found["failed"]
        ),
        *(f"- {warning}" for warning in warnings if warning),
    ]


if __name__ == "__main__":
    print(report(load(Path(__file__).parent / "results")))
