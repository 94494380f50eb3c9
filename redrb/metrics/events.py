"""The events that makers and trainers report, such as a step, and their figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol


class Write(Protocol):
    """Writes one event, such as to a file of JSON lines, or to TensorBoard."""

    def __call__(self, event: str, **values: object) -> None:
        """Write an event with its values."""


def write_to_all(writes: Sequence[Write]) -> Write:
    """Return a function that writes each event to several places, in this order."""

    def write(event: str, **values: object) -> None:
        for each in writes:
            each(event, **values)

    return write


def numbers_of(values: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Yield the values of an event that are finite numbers, also those in tensors of one element.

    Args:
        values: The values of an event by name.
    """
    for name, value in values.items():
        if value is None or isinstance(value, str | bytes | list | tuple | dict):
            continue
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):  # no number; a tensor of several elements
            continue
        if math.isfinite(number):
            yield name, number
