"""The events that makers and trainers report."""

from __future__ import annotations

from typing import Protocol


class Write(Protocol):
    """Writes one event, such as to a file of JSON lines."""

    def __call__(self, event: str, **values: object) -> None:
        """Write an event with its values."""
