"""Context managers: objects that are entered as they are, and may close at the end of the block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self


class Entered(ABC):
    """A context manager that is what its `with` block gets."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """End the block."""


class Closing(Entered):
    """A context manager that is closed at the end of its block."""

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close it."""
