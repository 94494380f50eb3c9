"""Reads the announcements of a task's workers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

from redrb.errors import DecodeError
from redrb.state.calls import Observed
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

MOST_WORKERS = 200
FORGOTTEN_MS = 600_000
"""Age of an announcement at which Redis removes it."""


def worker_state(name: str, seen_s: float, packed: bytes) -> WorkerState | None:
    """Return a worker's state from its announcement; None if it is damaged.

    `seen_s` are the seconds since it came. `packed` is the newest weight version then, a space, and
    the announcement, as `redrb/stream/worker.py` packs it.
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
    life: Life = "silent" if seen_s <= lease_s else "dead"  # its leases are taken over
    if ended:
        life = "ended"
    elif not period_s or seen_s <= SILENT_PERIODS * period_s:
        life = "live"
    waits_for = said.get("waits_for") or ""
    waits_for = waits_for if waits_for in get_args(WaitsFor) else ""
    figures = {name: check(said.get(name)) for name, check in _SAID.items()}
    used, waits_s, step_s = figures["weight_version"], figures["waits_s"], figures["step_s"]
    return WorkerState(
        **figures
        | {
            "name": _text(name),
            "role": said["role"],
            "life": life,
            "seen_s": seen_s,
            "uptime_s": figures["uptime_s"] + (0.0 if ended else seen_s),
            "behind": max(0, int(newest) - used) if used and said["role"] != "trainer" else 0,
            "waits_for": "" if ended else waits_for,
            "waits_s": waits_s + seen_s if waits_for and not ended else 0.0,
            "step_s": step_s + seen_s if step_s and not ended else 0.0,
            "metrics": _metrics(said.get("metrics")),
        }
    )


def in_order(workers: Iterable[WorkerState]) -> list[WorkerState]:
    """Return workers in an order that announcements do not change: by life, role, and name.

    Numbers in names count as numbers: "maker-2" comes before "maker-10".
    """

    def place(worker: WorkerState) -> tuple[bool, str, list[tuple[int, str]], str]:
        parts = re.split(r"([0-9]+)", worker.label or worker.name)
        name = [(int(part) if part.isdecimal() else 0, part) for part in parts]
        return not worker.alive, worker.role, name, worker.name

    return sorted(workers, key=place)


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


_SAID: Mapping[str, Callable[[object], Any]] = {
    **dict.fromkeys(("label", "host", "program", "redrb", "weights_name"), _text),
    **dict.fromkeys(
        ("pid", "weight_version", "groups", "samples", "leased", "rights", "steps"), _count
    ),
    **dict.fromkeys(
        ("period_s", "uptime_s", "waits_s", "step_s", "usual_step_s", "step_limit_s", "steps_s"),
        _number,
    ),
}
"""Fields of an announcement that a `WorkerState` has, too, and their checks."""


def _metrics(value: object) -> Mapping[str, float]:
    found: dict[str, float] = {}
    items: list[tuple[Any, Any]] = list(value.items()) if isinstance(value, dict) else []
    for name, figure in items[:MOST_METRICS]:
        if isinstance(name, str) and type(figure) in (int, float) and math.isfinite(figure):
            found[_text(name)] = float(figure)
    return found


class Announced:
    """The announcements in one partition of a task.

    Workers announce themselves every few seconds, so a look reads only what came since the look
    before it.
    """

    def __init__(self) -> None:
        self._incarnation = ""
        self._known: dict[str, tuple[float, bytes]] = {}
        self._read_ms = 0.0

    @property
    def since(self) -> str:
        """The time from which on the next look is to read, in the server's ms; "-inf": all."""
        return f"{self._read_ms:.0f}" if self._read_ms else "-inf"

    def note(self, found: Observed) -> list[tuple[str, float, bytes]]:
        """Return name, seconds since the announcement, and announcement of each worker."""
        incarnation, now_ms = found.settings.get("incarnation", ""), found.server_ms
        other = self._incarnation not in ("", incarnation)
        if other or not self._read_ms:
            self._known = {}
        for (name, packed), seen_ms in zip(found.workers, found.seen_ms, strict=True):
            self._known[name.decode(errors="replace")] = seen_ms, packed
        newest = sorted(self._known.items(), key=lambda item: -item[1][0])[:MOST_WORKERS]
        self._known = {name: known for name, known in newest if now_ms - known[0] < FORGOTTEN_MS}
        # all is read again if the server's clock was set back, or workers were removed
        again = other or now_ms < self._read_ms or found.workers_total < len(self._known)
        self._read_ms = 0.0 if again else now_ms
        self._incarnation = incarnation
        return [
            (name, (now_ms - seen_ms) / 1000, packed)
            for name, (seen_ms, packed) in self._known.items()
        ]
