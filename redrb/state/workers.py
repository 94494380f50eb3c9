"""Reads the announcements of a task's workers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from redrb.errors import DecodeError
from redrb.state.model import Life, Role, WaitsFor, WorkerState
from redrb.unpacking import unpack

MOST_BYTES = 1024
"""Most bytes of an announcement."""

MOST_METRICS = 16
"""Most figures of an announcement."""

SILENT_PERIODS = 1.3
"""A worker is silent when its announcement is late by three tenths of a period."""

_ENDED_S = 540.0
"""By so much the time of a last announcement is set back: `include/announcements.lua`."""

_TEXT = 128


def worker_state(name: str, seen_s: float, packed: bytes) -> WorkerState | None:
    """Return a worker's state from its announcement; None if it is damaged.

    Args:
        name: Its name.
        seen_s: Seconds since it came, by the server's clock.
        packed: The newest weight version then, a space, and the announcement, as
            `redrb/stream/worker.py` packs it.
    """
    newest, _, said_then = packed.partition(b" ")
    if len(said_then) > MOST_BYTES or not (newest.isdigit() and len(newest) < 19):
        return None
    try:
        said = unpack(said_then, "announcement of a worker")
    except DecodeError:
        return None
    if not isinstance(said, dict) or said.get("role") not in get_args(Role):
        return None
    ended = said.get("ended") is True
    seen_s = max(0.0, seen_s - _ENDED_S * ended)
    period_s, lease_s = _number(said.get("period_s")), _number(said.get("lease_s"))
    waits_for = said.get("waits_for") or ""
    waits_for = waits_for if waits_for in get_args(WaitsFor) else ""
    return WorkerState(
        name=_text(name),
        role=said["role"],
        label=_text(said.get("label")),
        host=_text(said.get("host")),
        pid=_count(said.get("pid")),
        program=_text(said.get("program")),
        redrb=_text(said.get("redrb")),
        life=_life(seen_s, period_s, lease_s, ended=ended),
        seen_s=seen_s,
        period_s=period_s,
        uptime_s=_number(said.get("uptime_s")) + (0.0 if ended else seen_s),
        weights_name=_text(said.get("weights_name")),
        weight_version=(used := _count(said.get("weight_version"))),
        behind=max(0, int(newest) - used) if used and said["role"] != "trainer" else 0,
        groups=_count(said.get("groups")),
        samples=_count(said.get("samples")),
        leased=_count(said.get("leased")),
        rights=_count(said.get("rights")),
        waits_for="" if ended else waits_for,  # type: ignore[arg-type]
        waits_s=_number(said.get("waits_s")) + seen_s if waits_for and not ended else 0.0,
        step_s=step_s + seen_s if (step_s := _number(said.get("step_s"))) and not ended else 0.0,
        usual_step_s=_number(said.get("usual_step_s")),
        step_limit_s=_number(said.get("step_limit_s")),
        steps=_count(said.get("steps")),
        steps_s=_number(said.get("steps_s")),
        metrics=_metrics(said.get("metrics")),
    )


def in_order(workers: Iterable[WorkerState]) -> list[WorkerState]:
    """Return workers in an order that announcements do not change: by life, role, and name.

    Numbers in names count as numbers: "maker-2" comes before "maker-10".
    """

    def place(worker: WorkerState) -> tuple[bool, str, list[tuple[int, str]], str]:
        parts = re.split(r"([0-9]+)", worker.label or worker.name)
        name = [(int(part) if part.isdecimal() else 0, part) for part in parts]
        return worker.life in ("dead", "ended"), worker.role, name, worker.name

    return sorted(workers, key=place)


def _life(seen_s: float, period_s: float, lease_s: float, *, ended: bool) -> Life:
    if ended:
        return "ended"
    if not period_s or seen_s <= SILENT_PERIODS * period_s:
        return "live"
    return "silent" if seen_s <= lease_s else "dead"  # its leases are taken over


def _text(value: object) -> str:
    """Return a text that no terminal takes for a command."""
    text = value if isinstance(value, str) else ""
    return "".join(char if char.isprintable() else "�" for char in text[:_TEXT])


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value < 1 << 63 else 0


def _number(value: object) -> float:
    if type(value) not in (int, float):
        return 0.0
    number = float(value)  # type: ignore[arg-type]
    return number if math.isfinite(number) and number >= 0 else 0.0


def _metrics(value: object) -> Mapping[str, float]:
    found: dict[str, float] = {}
    items: list[tuple[Any, Any]] = list(value.items()) if isinstance(value, dict) else []
    for name, figure in items[:MOST_METRICS]:
        if isinstance(name, str) and type(figure) in (int, float) and math.isfinite(figure):
            found[_text(name)] = float(figure)
    return found
