"""One plot a section, from its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.shapes import SHAPES

Figures = dict[str, Any]

COLOURS = {"redrb": "#c0392b", "raw": "#7f8c8d", "packed": "#bdc3c7"}
PALETTE = ("#2471a3", "#229954", "#b9770e", "#7d3c98", "#148f77", "#5d6d7e")


def draw(section: str, figures: Figures, path: Path) -> None:
    """Draw a section's plot as a PNG."""
    figure = Figure(figsize=(10, 6.5), dpi=110, layout="constrained")
    DRAWINGS[section](figure, figures)
    figure.savefig(path, facecolor="white")


def _colour(name: str, index: int) -> str:
    return COLOURS.get(name, PALETTE[index % len(PALETTE)])


def _bars(axes: Axes, names: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> None:
    """Draw bars for each name, one of each series, with their values above."""
    width = 0.85 / len(series)
    crowded = len(series) * len(names) > 15
    for index, (label, values) in enumerate(series.items()):
        places = [at + (index - (len(series) - 1) / 2) * width for at in range(len(names))]
        shown = [value if value is not None else 0.0 for value in values]
        bars = axes.bar(places, shown, width, label=label, color=_colour(label, index))
        texts = ["" if value is None else _short(value) for value in values]
        axes.bar_label(
            bars,
            texts,
            fontsize=7.5 if crowded else 9,
            padding=3,
            rotation=90 if crowded else 0,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    axes.margins(x=0.02, y=0.35 if crowded else 0.15)
    axes.set_xticks(range(len(names)), names)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def _log_scale(axes: Axes) -> None:
    """Use a logarithmic scale whose numbers are written out."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1,) if high > 500 * low else (1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _thousands(axes: Axes) -> None:
    """Write 10,000 instead of 10000."""
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _legend(axes: Axes) -> None:
    """Put the legend to the right of a plot, where it hides nothing."""
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _floor(axes: Axes, height: float = 1.0) -> None:
    axes.axhline(height, color="black", linewidth=0.8, linestyle="--")


def _shapes(figure: Figure, figures: Figures) -> None:
    """Draw rates over the raw floor, and processor time over that of the raw floor."""
    shapes = figures["shapes"]
    systems = list(dict.fromkeys(name for each in shapes.values() for name in each["systems"]))
    above, below = figure.subplots(2, 1)
    rates = {
        system: [
            each["systems"][system]["samples_per_s"] / each["systems"]["raw"]["samples_per_s"]
            if system in each["systems"]
            else None
            for each in shapes.values()
        ]
        for system in systems
    }
    _bars(above, list(shapes), rates)
    _floor(above)
    _log_scale(above)
    above.set_title(f"Samples/s over the raw floor, {figures['server']} (higher is better)")
    above.set_ylabel("times the raw floor")
    _legend(above)
    _processor_time(below, shapes)


def _processor_time(axes: Axes, shapes: Figures) -> None:
    """Draw the processor time of a sample by process, as a share of the raw floor's."""
    systems, parts = ("redrb", "raw", "packed"), ("producer_us", "server_us", "consumer_us")
    shades = ("#f2d7d5", "#e6b0aa", "#cd6155")
    for index, system in enumerate(systems):
        places = [at + (index - 1) * 0.28 for at in range(len(shapes))]
        floors = [sum(each["systems"]["raw"][part] for part in parts) for each in shapes.values()]
        bottom = [0.0] * len(shapes)
        for part, shade in zip(parts, shades, strict=True):
            heights = [
                each["systems"][system][part] / floor
                for each, floor in zip(shapes.values(), floors, strict=True)
            ]
            label = part.removesuffix("_us") if not index else None
            axes.bar(places, heights, 0.25, bottom=bottom, color=shade, label=label)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        for place in places:
            axes.text(place, 0.03, system, fontsize=7, ha="center", rotation=90)
    _floor(axes)
    axes.set_xticks(range(len(shapes)), list(shapes))
    axes.set_title("Processor time of a sample, all processes (lower is better)")
    axes.set_ylabel("times the raw floor")
    _legend(axes)


def _puts(figure: Figure, figures: Figures) -> None:
    shapes = figures["shapes"]
    above, below = figure.subplots(2, 1)
    systems = ("redrb", "redrb stalest", "packed")
    groups = [SHAPES[name].put_groups for name in shapes]
    names = [
        f"{name}\n{count} group{'s' * (count > 1)}"
        for name, count in zip(shapes, groups, strict=True)
    ]
    _bars(above, names, _values(shapes, systems, "wire_bytes_a_put"))
    _floor(above, 600)
    _log_scale(above)
    above.set_title("Bytes on the wire of a put, beyond its payload")
    above.set_ylabel("bytes\n(dashed: target for one group)")
    _legend(above)
    sizes = {
        name: [
            each["systems"][name]["memory_bytes"] / each["packed_bytes"] for each in shapes.values()
        ]
        for name in ("redrb", "redrb stalest", "raw")
    }
    _bars(below, list(shapes), sizes)
    _floor(below)
    below.set_title("Memory in Redis over the encoded sample")
    below.set_ylabel("times the encoded bytes")
    _legend(below)


def _values(shapes: Figures, systems: Sequence[str], field: str) -> dict[str, list[float | None]]:
    return {
        system: [each["systems"][system][field] for each in shapes.values()] for system in systems
    }


def _orders(figure: Figure, figures: Figures) -> None:
    axes = figure.subplots()
    shapes = figures["shapes"]
    orders = list(next(iter(shapes.values()))["over_fifo"])
    _bars(
        axes,
        list(shapes),
        {
            order: [each["over_fifo"][order] for each in shapes.values()]
            for order in orders
            if order != "fifo"
        },
    )
    _floor(axes)
    axes.set_title(f"Samples/s of orders over fifo, {figures['server']}")
    axes.set_ylabel("times fifo (dashed)")
    _legend(axes)


def _servers(figure: Figure, figures: Figures) -> None:
    axes = figure.subplots()
    cases = figures["cases"]
    names = [f"{case['server']}\n{case['transport']}\n{case['way']}" for case in cases]
    for index, system in enumerate(("redrb", "raw")):
        found = [case["systems"][system] for case in cases]
        rates = [each["samples_per_s"] for each in found]
        spread = [
            [each["samples_per_s"] - each["least"] for each in found],
            [each["most"] - each["samples_per_s"] for each in found],
        ]
        places = [at + (index - 0.5) * 0.4 for at in range(len(cases))]
        axes.bar(places, rates, 0.38, label=system, color=COLOURS[system])
        axes.errorbar(places, rates, yerr=spread, fmt="none", ecolor="black", elinewidth=0.8)
    axes.set_xticks(range(len(cases)), names, fontsize=8)
    axes.set_title(f"{figures['shape']}: medians, least and most of the rounds")
    axes.set_ylabel("samples/s")
    _thousands(axes)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    _legend(axes)


def _scale(figure: Figure, figures: Figures) -> None:
    panels = figure.subplots(1, 4, sharey=True)
    for axes, what in zip(panels, ("makers", "trainers"), strict=False):
        for system in ("redrb", "raw"):
            counts = [case[what] for case in figures[what]]
            rates = [case["systems"][system]["samples_per_s"] for case in figures[what]]
            axes.plot(list(map(str, counts)), rates, "o-", color=COLOURS[system], label=system)
        axes.set_title("2 makers" if what == "trainers" else "1 trainer")
        axes.set_xlabel(what)
    tasks = figures["tasks"]
    rates = [case["redrb"]["samples_per_s"] for case in tasks]
    panels[2].plot([str(case["tasks"]) for case in tasks], rates, "o-", color=COLOURS["redrb"])
    panels[2].set_title("1 maker, 1 trainer")
    panels[2].set_xlabel("tasks in turn")
    idle = figures["idle_clients"]
    for system in ("redrb", "raw"):
        rates = [case["systems"][system]["samples_per_s"] for case in idle.values()]
        panels[3].plot(list(idle), rates, "o-", color=COLOURS[system], label=system)
    panels[3].set_title("1 maker, 1 trainer")
    panels[3].set_xlabel("idle clients")
    _thousands(panels[0])
    panels[0].set_ylabel(f"samples/s, {figures['shape']}")
    _legend(panels[3])
    for axes in panels:
        axes.set_ylim(bottom=0)
        axes.margins(x=0.12)
        axes.grid(alpha=0.3)


def _latency(figure: Figure, figures: Figures) -> None:
    shapes = figures["shapes"]
    panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    for axes, (shape, found) in zip(panels, shapes.items(), strict=True):
        for system, each in found.items():
            label = f"{system}, {each['puts_per_s']:,.0f} puts/s"
            axes.plot(range(1, 100), each["percentiles_ms"], color=COLOURS[system], label=label)
        _floor(axes, 3.0)
        _log_scale(axes)
        axes.set_title(shape)
        axes.legend(fontsize=8, loc="upper left")
        axes.set_xlabel("percentile")
        axes.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("put to batch in hand, ms (dashed: target for p99)")


def _backlog(figure: Figure, figures: Figures) -> None:
    axes = figure.subplots()
    found = figures["microseconds"]
    backlogs = [int(groups) for groups in found]
    for index, call in enumerate(next(iter(found.values()))):
        costs = [each[call] for each in found.values()]
        axes.plot(
            [f"{groups:,}" for groups in backlogs], costs, "o-", label=call, color=PALETTE[index]
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("groups that wait")
    axes.set_ylabel("microseconds a call, round trip included")
    _thousands(axes)
    axes.set_title(f"Calls by backlog, {figures['server']}")
    axes.grid(alpha=0.3)
    _legend(axes)


def _replicas(figure: Figure, figures: Figures) -> None:
    axes, shapes = figure.subplots(), figures["shapes"]
    ratios = [each["over_no_wait"] for each in shapes.values()]
    _bars(axes, list(shapes), {"one replica": ratios})
    _floor(axes)
    axes.set_title(f"Puts that wait for one replica, {figures['server']}")
    axes.set_ylabel("times the puts that wait for none (dashed)")


def _shards(figure: Figure, figures: Figures) -> None:
    """Draw the busiest node's time over that of one node, beside 1/n."""
    panels = figure.subplots(1, len(figures["sizes"]), sharey=True, squeeze=False)[0]
    for axes, (size, found) in zip(panels, figures["sizes"].items(), strict=True):
        for index, (ending, label) in enumerate(
            (("", f"{figures['shards']} shards"), ("separate tasks", "separate tasks"))
        ):
            cases = {
                int(name.partition(",")[0].removeprefix("nodes=")): case
                for name, case in found.items()
                if name.partition(", ")[2] == ending
            }
            nodes = list(cases)
            ratios = [case["busiest_over_one_node"] for case in cases.values()]
            axes.plot(nodes, ratios, "o-", label=label, color=PALETTE[index])
        axes.plot(nodes, [1 / count for count in nodes], "--", label="1/n", color="#5d6d7e")
        axes.set_ylim(bottom=0)
        axes.set_title(size)
        axes.set_xlabel("nodes")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    panels[0].set_ylabel("processor time of the busiest node, over that of one node")


def _profile(figure: Figure, figures: Figures) -> None:
    """Draw the parts of the server's time over the whole time of the packed floor."""
    axes, shapes = figure.subplots(), figures["shapes"]
    colours = ("#5d6d7e", "#aeb6bf", "#2471a3", "#b9770e", "#c0392b")
    parts = {
        "kernel": "kernel: sockets",
        "rest": "protocol, events",
        "sent": "commands of clients",
        "called": "commands of scripts",
        "lua": "Lua",
    }
    for index, system in enumerate(("packed", "redrb")):
        places = [at + (index - 0.5) * 0.4 for at in range(len(shapes))]
        bottom = [0.0] * len(shapes)
        for part, colour in zip(parts, colours, strict=True):
            heights = [
                each["systems"][system][part] / each["systems"]["packed"]["server"]
                for each in shapes.values()
            ]
            label = None if index else parts[part]
            axes.bar(places, heights, 0.38, bottom=bottom, color=colour, label=label)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        for place, height in zip(places, bottom, strict=True):
            axes.text(place, height + 0.03, system, fontsize=8, ha="center")
    axes.set_xticks(range(len(shapes)), list(shapes))
    axes.set_title(f"Processor time of the server by part, {figures['server']}")
    axes.set_ylabel("times the packed floor")
    axes.margins(y=0.08)
    _legend(axes)


def _staleness(figure: Figure, figures: Figures) -> None:
    """Draw discarded groups, idle time and durations of each case by bound."""
    jobs, bounds = figures["jobs"], ("no bound", "expiry", "limit", "admission")
    rows = {
        "discarded_share": "groups discarded, %",
        "idle_share": "trainer idle, %",
        "ks_distance": "trained against made:\nKolmogorov-Smirnov distance, %",
    }
    for axes, (field, label) in zip(figure.subplots(3, 1, sharex=True), rows.items(), strict=True):
        shares = {bound: [100 * each[bound][field] for each in jobs.values()] for bound in bounds}
        _bars(axes, list(jobs), shares)
        if field == "ks_distance":
            chance = [100 * each["admission"]["ks_critical"] for each in jobs.values()]
            for at, height in enumerate(chance):
                axes.hlines(height, at - 0.45, at + 0.45, color="black", linestyle="--", lw=0.8)
        axes.set_ylabel(label)
        axes.margins(y=0.3)
    first, *_ = figure.axes
    first.set_title(
        f"{figures['makers']} makers with a heavy tail of durations, {figures['server']} "
        "(dashed: distance by chance, 5%)"
    )
    _legend(first)


def _observing(figure: Figure, figures: Figures) -> None:
    axes = figure.subplots()
    found = figures["consumer_groups"]
    percents = [each["percent_of_a_core"] for each in found.values()]
    names = ["1 consumer group" if each == "1" else f"{each} consumer groups" for each in found]
    _bars(axes, names, {"processor time of the server": percents})
    axes.set_ylabel("percent of a core")
    axes.set_title(
        f"{figures['observers']} observers, one look a second each, at a task with "
        f"{figures['workers']} workers"
    )


def _engines(figure: Figure, figures: Figures) -> None:
    """Draw seconds, bytes from Redis and memory, of the backend beside the folder."""
    cases, ways = figures["cases"], ("backend", "folder")
    names = [name.removeprefix("backend, ") for name in cases if name.startswith("backend")]
    labels = [name + (" server" if name.endswith("1") else " servers") for name in names]
    rows = {
        "seconds": "seconds until all\nservers have it",
        "sent_percent": "bytes from Redis,\n% of the model's",
        "own_over_layer": "own memory at most,\nlargest layers",
    }
    for axes, (field, label) in zip(figure.subplots(3, 1, sharex=True), rows.items(), strict=True):
        _bars(
            axes, labels, {way: [cases[f"{way}, {name}"][field] for name in names] for way in ways}
        )
        axes.set_ylabel(label)
        axes.margins(y=0.3)
    first, *_ = figure.axes
    first.set_title(
        f"A new version of {figures['state_mb']:,.0f} MB in vLLM on a CPU, {figures['server']}"
    )
    _legend(first)


def _gateway(figure: Figure, figures: Figures) -> None:
    """Draw turns a second at the gateway and at its engine, and the added time of a turn."""
    cases, (above, below) = figures["cases"], figure.subplots(2, 1, sharex=True)
    names = [" x ".join(part.split()[0] for part in name.split(", ")) for name in cases]
    rates = {"gateway": "turns_per_s", "engine alone": "engine_turns_per_s"}
    shown = {way: [each[field] for each in cases.values()] for way, field in rates.items()}
    _bars(above, names, shown)
    above.set_ylabel("turns/s")
    above.set_yscale("log")
    above.set_title(f"Agents x turns of a session x tokens of a turn; {figures['server']}")
    _legend(above)
    _bars(below, names, {"gateway": [each["added_ms"] for each in cases.values()]})
    below.set_ylabel("added ms of a turn")
    below.set_yscale("log")
    below.tick_params(axis="x", rotation=60)


DRAWINGS: dict[str, Callable[[Figure, Figures], None]] = {
    "shapes": _shapes,
    "puts": _puts,
    "orders": _orders,
    "servers": _servers,
    "scale": _scale,
    "latency": _latency,
    "backlog": _backlog,
    "profile": _profile,
    "shards": _shards,
    "replicas": _replicas,
    "observing": _observing,
    "staleness": _staleness,
    "gateway": _gateway,
    "engines": _engines,
}
