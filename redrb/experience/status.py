"""What became of a rollout."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Status(StrEnum):
    """State of a rollout, in the words of XTuner v1."""

    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"
    FILTERED = "filtered"
    ARCHIVED = "archived"


_FIRST_THAT_ANY_HAS = (Status.FAILED, Status.ABORTED, Status.EXPIRED, Status.FILTERED)


def group_status(statuses: Iterable[Status]) -> Status:
    """Derive a group's status from its members', as XTuner v1 does.

    All completed is completed; else the first that any member has, in the order failed, aborted,
    expired, filtered; else the first member's own.
    """
    members = list(statuses)
    for status in _FIRST_THAT_ANY_HAS:
        if status in members:
            return status
    return members[0] if members else Status.INIT
