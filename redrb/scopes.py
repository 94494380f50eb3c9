"""Context managers: objects that are entered as they are, and may close at the end of a block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, Self, TypeVar


class _Closes(Protocol):
    def close(self) -> object: ...


C = TypeVar("C", bound=_Closes)


@contextmanager
def closed_on_error(opened: C) -> Iterator[C]:
    """Close an object if a step in this block fails, before its user has it; else it stays open."""
    with ExitStack() as undo:
        undo.callback(opened.close)
        yield opened
        undo.pop_all()


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
