"""Which tasks starve a mixture: how long takes waited for each, and the errors that name them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from redrb.errors import BatchTimeout
from redrb.stream.waiting import Wait


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


@dataclass(slots=True)
class Shortages:
    """Tasks that one take of a mixture found short.

    Attributes:
        waited_s: Task -> seconds that the take waited for it.
    """

    waited_s: dict[str, float] = field(default_factory=dict)

    def add(self, task: str, seconds: float = 0.0) -> None:
        """Note that a task was short, and seconds of waiting for it."""
        self.waited_s[task] = self.waited_s.get(task, 0.0) + seconds

    @contextmanager
    def timed(self, task: str, wait: Wait) -> Iterator[None]:
        """Count the time in this block as waiting for a task; "" counts as waiting for none."""
        began = wait.waited_s
        try:
            yield
        finally:
            if task:
                self.add(task, wait.waited_s - began)

    def behind_another_take(
        self,
        mixture: str,
        namespace: str,
        missing: Mapping[str, int],
        available: Callable[[str], int],
        waited_s: float,
        *,
        starving: bool,
    ) -> BatchTimeout:
        """Return the error of a take whose turn did not come in time.

        Args:
            mixture: Name of the mixture in messages.
            namespace: Namespace of its tasks.
            missing: Task -> groups, of the task that starves the take whose turn it is, or of all
                tasks of this one.
            available: Counts the groups that wait in a task.
            waited_s: Seconds waited.
            starving: Whether the take whose turn it is waits for the missing groups.
        """
        if starving:
            for task in missing:
                self.add(task)
        counts = {task: (available(task), needed) for task, needed in missing.items()}
        note = f"An earlier take from the mixture {mixture} has not ended: it needs these groups."
        return _timeout(counts, namespace, note, waited_s)

    def out_of_time(
        self,
        mixture: str,
        shares: Mapping[str, int],
        leased: Collection[str],
        available: Callable[[str], int],
        error: BatchTimeout,
        waited_s: float,
    ) -> BatchTimeout:
        """Return the error of a take that found some of its tasks short.

        Args:
            mixture: Name of the mixture in messages.
            shares: Task -> groups to take from it.
            leased: Tasks whose groups were leased.
            available: Counts the groups that wait in a task.
            error: Error of the task for which the take waited.
            waited_s: Seconds waited.
        """
        counts = {error.task: (error.available, error.wanted)}
        for task, share in shares.items():
            if share and task not in leased and task not in counts:
                waiting = available(task)
                if waiting < share:
                    counts[task] = (waiting, share)
                    self.add(task)
        note = f"To take {sum(shares.values())} groups from the mixture {mixture}."
        return _timeout(counts, error.namespace, note, waited_s, error)


def _timeout(
    counts: Mapping[str, tuple[int, int]],
    namespace: str,
    note: str,
    waited_s: float,
    first: BatchTimeout | None = None,
) -> BatchTimeout:
    """Return the error that names the tasks that had too few groups.

    Args:
        counts: Task -> groups that wait, and groups needed.
        namespace: Namespace of the tasks.
        note: A sentence about the take.
        waited_s: Seconds waited.
        first: Error of the task for which the take waited.
    """
    error = BatchTimeout(
        task=", ".join(counts),
        namespace=namespace,
        wanted=sum(needed for _, needed in counts.values()),
        available=sum(available for available, _ in counts.values()),
        waited_s=waited_s,
        blocked=first.blocked if first else 0,
        expired=first.expired if first else 0,
        others=first.others if first else 0,
        fates=first.fates if first and len(counts) == 1 else {},
        similar=first.similar if first and len(counts) == 1 else (),
    )
    error.add_note(note)
    if len(counts) > 1:
        if first is not None:
            error.add_note(str(first))
        for task, (available, needed) in counts.items():
            error.add_note(f"task {task!r}: {available} of {needed} groups were waiting.")
    return error
