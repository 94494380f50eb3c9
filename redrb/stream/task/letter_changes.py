"""`requeue`, `drop`, `change_letters`: change dead letters of a task, some at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from redrb.errors import ConfigError
from redrb.stream.task.calls import DropLetters, Requeue
from redrb.stream.task.entries import texts_of
from redrb.stream.task.reach import Reach
from redrb.stream.task.store import TaskStore

LETTERS_OF_A_CALL = 20
"""Most dead letters that one script call requeues or deletes."""


def requeue(store: TaskStore, group: str, ids: Sequence[int]) -> int:
    """Requeue dead letters to their old places; returns how many. ConfigError: one has no place."""
    requeued = 0
    for seqs in texts_of(ids, LETTERS_OF_A_CALL):
        for page in store.pages(Requeue(group, seqs)):
            if page.unsortable is not None:
                raise _no_place(store.task, *page.unsortable)
            requeued += page.found
    return requeued


def drop(store: TaskStore, group: str, ids: Sequence[int]) -> int:
    """Delete dead letters of a consumer group for good; returns how many."""
    return sum(store.call(DropLetters(group, seqs)) for seqs in texts_of(ids, LETTERS_OF_A_CALL))


def change_letters(
    change: Callable[[TaskStore, str, Sequence[int]], int],
    reach: Reach,
    group: str,
    ids: Iterable[int],
) -> int:
    """Change dead letters in all partitions of a task; returns how many.

    Args:
        change: `requeue` or `drop`.
        ids: Their ids; those without a letter, and 0, are left out.
    """
    places = reach.stores[0].numbering.by_partition(dict.fromkeys(ids))

    def change_in(number: int) -> int:
        return change(reach.stores[number], group, [seq for seq in places[number] if seq > 0])

    return sum(reach.each(places, change_in).values())


def _no_place(task: str, order: str, former: str) -> ConfigError:
    """Return the error for dead letters that were given up in another order of the task."""
    given_up = f"in the order {former!r}" if former else "before the order changed"
    return ConfigError(
        f"some of these dead letters of task {task!r} cannot be requeued: their "
        f"groups were given up {given_up}, and Redis cannot compute their scores in the order "
        f"{order!r}. Put their samples as new groups, stream.put(letter.items), and drop the "
        "letters."
    )
