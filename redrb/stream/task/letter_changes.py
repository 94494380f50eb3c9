"""`requeue_letters`, `drop_letters`: change dead letters of a task, in all of its partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from redrb.stream.task.numbering import Numbering
from redrb.stream.task.reach import Reach
from redrb.stream.task.scripts import TaskScripts
from redrb.stream.task.store import TaskStore


def requeue_letters(stores: Sequence[TaskStore], group: str, ids: Iterable[int]) -> int:
    """Let dead letters of a consumer group wait again, in their old places; returns how many.

    Args:
        stores: All partitions of the task.
        group: Consumer group that gave them up.
        ids: Their ids; those without a letter, and 0, are left out.
    """
    return _change(stores, ids, lambda scripts, seqs: scripts.requeue(group, seqs))


def drop_letters(stores: Sequence[TaskStore], group: str, ids: Iterable[int]) -> int:
    """Delete dead letters of a consumer group for good; returns how many."""
    return _change(stores, ids, lambda scripts, seqs: scripts.drop_letters(group, seqs))


def _change(
    stores: Sequence[TaskStore],
    ids: Iterable[int],
    change: Callable[[TaskScripts, list[int]], int],
) -> int:
    places = Numbering(len(stores)).by_partition(dict.fromkeys(ids))

    def change_in(number: int) -> int:
        return change(TaskScripts(stores[number]), [seq for seq in places[number] if seq > 0])

    return sum(Reach(stores).each(places, change_in).values())
