"""`Announced`: the announcements of a task's workers that earlier looks have read."""

from __future__ import annotations

from typing import Final

from redrb.state.calls import Observed

MOST_WORKERS: Final = 200
FORGOTTEN_MS: Final = 600_000
"""Age of an announcement at which Redis removes it."""


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
        """Return name, seconds since the announcement, and announcement of each worker.

        Args:
            found: The task, with the announcements that were read since `since`.
        """
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
