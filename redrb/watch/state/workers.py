"""Reads the announcements of a task's workers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import msgspec

from redrb.stream.announcement import MOST_BYTES, Announcement
from redrb.watch.state.calls import Observed
from redrb.watch.state.model import Life, WorkerState
from redrb.words import printable

SILENT_PERIODS = 1.3
"""A worker is silent when its announcement is late by three tenths of a period."""

_ENDED_S = 600.0
"""By so much the time of a last announcement is set back: `include/announcements.lua`."""

LATE = ("silent", "dead")
"""Lives of workers whose heartbeat did not come."""

MOST_WORKERS = 200
FORGOTTEN_MS = 1_200_000
"""Age of an announcement at which Redis removes it."""

_SHOWN_S, _ENDED_SHOWN_S = 600.0, 60.0
"""Age up to which a worker is shown; Redis keeps it for longer, as it may have replaced another."""


def worker_state(name: str, seen_s: float, packed: bytes) -> WorkerState | None:
    """Return a worker's state from its announcement; None if it is damaged.

    `seen_s` are the seconds since it came. `packed` is the newest weight version then, a space, and
    the announcement, as `redrb/stream/worker.py` packs it.
    """
    newest, _, said_then = packed.partition(b" ")
    if len(said_then) > MOST_BYTES or not (newest.isdigit() and len(newest) < 19):
        return None
    try:
        said = msgspec.msgpack.decode(said_then, type=Announcement)
    except (ValueError, RecursionError):
        return None
    seen_s = max(0.0, seen_s - _ENDED_S * said.ended)
    life: Life = "silent" if seen_s <= said.lease_s else "dead"  # its leases are taken over
    if said.ended:
        life = "ended"
    elif not said.period_s or seen_s <= SILENT_PERIODS * said.period_s:
        life = "live"
    passed_s, used = 0.0 if said.ended else seen_s, said.weight_version
    given: dict[str, Any] = {field.name: getattr(said, field.name) for field in fields(said)}
    given |= {name: printable(given[name]) for name in _TEXTS}
    return WorkerState(
        **given
        | {
            "name": printable(name[:_MOST_NAME]),
            "life": life,
            "seen_s": seen_s,
            "uptime_s": said.uptime_s + passed_s,
            "behind": max(0, int(newest) - used) if used and said.role != "trainer" else 0,
            "waits_s": said.waits_s + passed_s if said.waits_for else 0.0,
            "step_s": said.step_s + passed_s if said.step_s else 0.0,
            "metrics": {printable(figure): value for figure, value in said.metrics.items()},
        }
    )


_TEXTS = ("label", "host", "program", "redrb", "weights_name", "fault", "engine")
_MOST_NAME = 128


def without_replaced(workers: Sequence[WorkerState]) -> list[WorkerState]:
    """Return the workers without those that died and were replaced.

    A worker that began after the last heartbeat of one of its name on its host replaces all such,
    as `redrb run` restarts it. Else a worker replaces one that is dead, of any name and host: names
    of makers have their process ids. One that has died, too, or has ended, replaced another before.
    """
    gone = sorted((each for each in workers if each.life in LATE), key=lambda each: each.seen_s)
    new = sorted(workers, key=lambda each: -each.uptime_s)
    replaced, used = set(), set()
    for named in (True, False):
        for old in gone:
            for each in new:
                if (
                    old.name not in replaced
                    and each is not old
                    and (each.life == "live" or not named)
                    and each.role == old.role
                    and each.uptime_s <= old.seen_s + old.period_s
                    and (
                        old.label and (each.label, each.host) == (old.label, old.host)
                        if named
                        else old.life == "dead" and each.name not in used
                    )
                ):
                    replaced.add(old.name)
                    used.add(each.name)
    return [each for each in workers if each.name not in replaced]


def shown_of(workers: Sequence[WorkerState]) -> list[WorkerState]:
    """Return the workers without those that were replaced, and those that are over for long."""
    return [
        worker
        for worker in without_replaced(workers)
        if worker.seen_s <= (_ENDED_SHOWN_S if worker.life == "ended" else _SHOWN_S)
    ]


def in_order(workers: Iterable[WorkerState]) -> list[WorkerState]:
    """Return workers in an order that announcements do not change: by life, role, and name.

    Numbers in names count as numbers: "maker-2" comes before "maker-10".
    """

    def place(worker: WorkerState) -> tuple[bool, str, list[tuple[int, str]], str]:
        parts = re.split(r"([0-9]+)", worker.label or worker.name)
        name = [(int(part) if part.isdecimal() else 0, part) for part in parts]
        return not worker.alive, worker.role, name, worker.name

    return sorted(workers, key=place)


class Announced:
    """The announcements in a task.

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
