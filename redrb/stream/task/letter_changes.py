"""`requeue_letters`, `drop_letters`: change dead letters of a task, in all of its partitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from redrb.stream.task.numbering import Numbering
from redrb.stream.task.scripts import TaskScripts
from redrb.stream.task.store import TaskStore


def requeue_letters(stores: Sequence[TaskStore], group: str, ids: Iterable[int]) -> int:
    """Let dead letters of a consumer group wait again, in their old places; returns how many.

    Args:
        stores: All partitions of the task.
        group: Consumer group that gave them up.
        ids: Their ids; those without a letter, and 0, are left out.
    """
    return sum(scripts.requeue(group, seqs) for scripts, seqs in _places(stores, ids))


def drop_letters(stores: Sequence[TaskStore], group: str, ids: Iterable[int]) -> int:
    """Delete dead letters of a consumer group for good; returns how many."""
    return sum(scripts.drop_letters(group, seqs) for scripts, seqs in _places(stores, ids))


def _places(
    stores: Sequence[TaskStore], ids: Iterable[int]
) -> Iterator[tuple[TaskScripts, list[int]]]:
    for place, seqs in Numbering(len(stores)).by_partition(dict.fromkeys(ids)).items():
        yield TaskScripts(stores[place]), [seq for seq in seqs if seq > 0]
