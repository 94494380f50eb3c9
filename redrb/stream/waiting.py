"""Requests that scripts have refused, and how long those that wait keep their places in queues."""

from __future__ import annotations

from redrb.connection.deadline import here
from redrb.errors import StoreError

QUEUE_TTL_MS = 3000
"""Time for which a waiter that stopped looking keeps its place in the queue."""

MOST_REFUSALS = 3
"""Refusals for the same reason, in one call, after which the task's keys count as damaged."""


def refused(task: str, *state: object) -> None:
    """Note that a script has refused a request, which is sent again in the state read since.

    Args:
        task: Name of the task.
        state: The state: revision of the settings, epoch, and the like.

    Raises:
        StoreError: It was refused several times in this state, or after the time was up.
    """
    deadline = here()
    reason = (task,) if deadline.pages_over else (task, *state)
    deadline.refusals[reason] += 1
    if deadline.refusals[reason] > MOST_REFUSALS:
        raise StoreError(
            f"task {task!r}: its scripts refuse the settings that Redis has just returned, so "
            "its keys are damaged, or other processes change its settings all the time. A "
            "change of any setting (`redrb set`) writes the rules anew that the scripts read."
        )
