"""The statuses of a rollout, and the one status of a group of rollouts."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Status(StrEnum):
    """Status of a rollout; the values are those of XTuner v1.

    A new status also gets a code on the wire (`STATUSES` in `redrb/codec/wire.py`) and a pool in
    Redis (`STATUSES` in `redrb/lua/include/pools.lua`).
    """

    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"
    FILTERED = "filtered"
    ARCHIVED = "archived"


_BY_PRECEDENCE = (Status.FAILED, Status.ABORTED, Status.EXPIRED, Status.FILTERED)


def group_status(statuses: Iterable[Status]) -> Status:
    """Derive a group's status from the statuses of its samples, as XTuner v1 does.

    It is the first status that any sample has, in the order failed, aborted, expired, filtered. If
    no sample has one of these, it is the status of the first sample.
    """
    members = list(statuses)
    for status in _BY_PRECEDENCE:
        if status in members:
            return status
    return members[0] if members else Status.INIT
