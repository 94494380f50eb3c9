"""Where redrb's processor time goes beyond the packed floor's, beside what the targets allow.

`python -m benchmarks.limits` reads the newest results and runs nothing. Makers, trainer and server
share two cores in these runs and keep both busy, so the rate of a shape is given by the processor
time that all of them need for a sample. A target of 4 times a peer's rate allows a quarter of the
peer's time. Where the packed floor, whose codec and ledger cost nothing, needs more than that, no
system on Redis reaches the target.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import Results, load, peer_target
from benchmarks.systems import PEERS

PARTS = ("server_us", "producer_us", "consumer_us")


def total(system: dict[str, Any]) -> float:
    """Return the processor time of a sample in all processes, in microseconds."""
    return float(sum(system[part] for part in PARTS))


def beyond_floor(results: Results) -> str:
    """Return a table of the processor time of a sample beyond the packed floor's."""
    rows = [
        "| shape | packed floor | redrb | beyond it: server | maker | trainer |",
        "|---|---|---|---|---|---|",
    ]
    for shape, found in results["shapes"]["shapes"].items():
        ours, floor = found["systems"]["redrb"], found["systems"]["packed"]
        cells = [total(floor), total(ours), *(ours[part] - floor[part] for part in PARTS)]
        rows.append(f"| `{shape}` | {' | '.join(map(_written, cells))} |")
    return "\n".join(rows)


def missed_peers(results: Results) -> str:
    """Return a table of the peers whose target is missed, and of what the packed floor reaches."""
    rows = [
        "| shape, peer | redrb | target | packed floor | it allows, us a sample | redrb takes |",
        "|---|---|---|---|---|---|",
    ]
    for shape, found in results["shapes"]["shapes"].items():
        systems = found["systems"]
        floor = systems["packed"]["samples_per_s"]
        for peer in (name for name in PEERS if name in systems):
            reached, wanted = found["redrb_over"][peer], peer_target(peer)
            if reached >= wanted:
                continue
            cells = [
                f"{reached:.2f}x",
                f"{wanted:g}x",
                f"{floor / systems[peer]['samples_per_s']:.2f}x",
                _written(total(systems["redrb"]) * reached / wanted),
                _written(total(systems["redrb"])),
            ]
            rows.append(f"| `{shape}`, {peer} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _written(microseconds: float) -> str:
    return f"{microseconds:,.0f}" if abs(microseconds) >= 100 else f"{microseconds:.1f}"


if __name__ == "__main__":
    found = load(Path(__file__).parent / "results")
    print(f"{beyond_floor(found)}\n\n{missed_peers(found)}")
