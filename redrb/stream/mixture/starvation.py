"""Which task a mixture waits for: figures of it, and the error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from redrb.errors import BatchTimeout


@dataclass(frozen=True, slots=True)
class Starvation:
    """How a mixture has waited for one task, in all processes that take from it.

    Attributes:
        short: Takes that found too few groups of the task.
        waited_s: Seconds that these takes waited for it, together.
        waiting_s: Seconds for which a take has been waiting for it now; 0 when none does.
    """

    short: int
    waited_s: float
    waiting_s: float


def starved(
    short: Mapping[str, tuple[int, int]],
    of: str,
    *,
    waited_s: float,
    first: BatchTimeout | None = None,
) -> BatchTimeout:
    """Return the error that names tasks that had too few groups.

    Args:
        short: Task -> groups that are there, and groups wanted.
        of: What was to be taken.
        waited_s: Seconds waited.
        first: What the task said that was waited for.
    """
    error = BatchTimeout(
        task=", ".join(short),
        wanted=sum(wanted for _, wanted in short.values()),
        available=sum(available for available, _ in short.values()),
        waited_s=waited_s,
        blocked=first.blocked if first else 0,
        expired=first.expired if first else 0,
        others=first.others if first else 0,
    )
    error.add_note(of)
    if len(short) > 1:
        for task, (available, wanted) in short.items():
            error.add_note(f"task {task!r}: {available} of {wanted} groups were waiting.")
    return error
