"""What a buffer does, one call after the other: every function here may wait for Redis."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from redrb.errors import BatchTimeout, DecodeError
from redrb.experience import Status
from redrb.experience.status import group_status
from redrb.replay.expiry import discard, expire, fill_steps, refresh, too_stale
from redrb.replay.rollout_classes import RolloutClasses
from redrb.replay.rollout_fields import status_of
from redrb.replay.rollout_packing import Unpacked, pack_group, unpack_group
from redrb.replay.staleness import Thresholds, expired_members, version_to_order_by
from redrb.replay.tasks import NEVER, Tasks
from redrb.stream import Lease
from redrb.stream.take.lease_part import Expiry

_log = logging.getLogger("redrb")


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a put is told of its group.

    Attributes:
        model_step: Step of the model that made the tokens without a step.
        train_step: The trainer's step.
        thresholds: When rollouts expire.
        retryable: Whether an expired group waits for new responses.
    """

    model_step: int | None
    train_step: int | None
    thresholds: Thresholds
    retryable: bool


class Taken(NamedTuple):
    """Groups of one task that nobody was given yet, and the lease that holds them, if any."""

    groups: list[list[Any]]
    lease: Lease | None


class Operations:
    """Puts, takes and refreshes groups of rollouts; safe among threads."""

    def __init__(self, tasks: Tasks, classes: RolloutClasses) -> None:
        self._tasks = tasks
        self._classes = classes
        self._heard = 0

    def put(self, group: list[Any], task: str, told: Arrival) -> None:
        """Bring a group up to date and store it, or discard it."""
        if told.model_step is not None:
            fill_steps(group, told.model_step)
        if told.train_step is not None:
            for rollout in group:
                if isinstance(rollout, dict):
                    rollout.setdefault("seq_staleness", 0)
            refresh(group, told.train_step)
            self._hear(told.train_step)
        stale = too_stale(group, told.train_step, told.thresholds)
        stream = self._tasks.open(task)
        if stale and not told.retryable:
            stream.discard_expired(1)
            discard(group)
            return
        version = version_to_order_by(group, told.train_step, self._heard)
        expire(stale)
        stream.put(
            pack_group(group, told.train_step),
            status=Status.EXPIRED if stale else group_status(map(status_of, group)),
            priority=-version if self._tasks.order == "stalest" else None,
        )

    def take(self, sizes: Mapping[str, int], status: Status) -> dict[str, Taken]:
        """Lease groups of several tasks; on an error none."""
        taken: dict[str, Taken] = {}
        try:
            for task, size in sizes.items():
                taken[task] = self._take_one(task, size, status)
        except BaseException:
            release(taken)
            raise
        return taken

    def count(self, task: str, status: Status) -> int:
        """Return how many groups of a status wait in a task."""
        stream = self._tasks.find(task)
        return 0 if stream is None else stream.count(status)

    def refresh(
        self,
        rules: Mapping[str, Thresholds],
        retryable: Mapping[str, bool],
        train_step: int,
        statuses: Collection[Status],
    ) -> dict[str, int]:
        """Expire what has become too stale; returns how many groups of each task did."""
        self._hear(train_step)
        return {
            task: self._refresh_one(
                task, rule, train_step, statuses, retryable=retryable.get(task, True)
            )
            for task, rule in rules.items()
        }

    def _hear(self, train_step: int) -> None:
        self._heard = max(self._heard, train_step)

    def _take_one(self, task: str, size: int, status: Status) -> Taken:
        stream = self._tasks.find(task) if size > 0 else None
        if stream is None:
            return Taken([], None)
        try:
            lease = stream.take(size, timeout=0, at_least=1, status=status)
        except BatchTimeout:
            return Taken([], None)
        try:
            groups = self._read(task, lease, status)
        except BaseException:
            lease.release()
            raise
        return Taken(groups, lease if lease else None)

    def _read(self, task: str, lease: Lease, status: Status) -> list[list[Any]]:
        """Return the groups of a lease as rollouts, as stale as the last refresh found them.

        What is no group of rollouts goes to the dead letters, so that it is in nobody's way.
        """
        refreshed = self._tasks.refreshed(task, status)
        groups = []
        for seq, items in zip(lease.ids, lease.groups(), strict=True):
            try:
                group = unpack_group(items, self._classes)
            except DecodeError as error:
                _log.error("task %r: group %d: %s", task, seq, error)
                lease.reject(str(error), [seq])
                continue
            expiry = lease.expiries.get(seq)
            if expiry is not None:
                _expire_late(group, expiry.current_version + 1, _thresholds(expiry))
            elif refreshed is not None and seq <= refreshed.last:
                _refresh_late(group, refreshed.train_step)
            groups.append([rollout.make(self._classes) for rollout in group])
        return groups

    def _refresh_one(
        self,
        task: str,
        rule: Thresholds,
        train_step: int,
        statuses: Collection[Status],
        *,
        retryable: bool,
    ) -> int:
        stream = self._tasks.find(task)
        if stream is None:
            return 0
        expired = stream.expire(
            train_step - 1,  # on-policy, the train step leads the model step by one
            max_staleness=None if rule.sequence is None else rule.sequence - 1,
            max_token_staleness=None if rule.token is None else rule.token - 1,
            statuses=tuple(statuses),
            on_expired="keep" if retryable else "discard",
        )
        self._tasks.note_refresh(task, statuses, train_step)
        return expired


def release(taken: Mapping[str, Taken]) -> None:
    """Give back what was taken."""
    for own in taken.values():
        if own.lease is not None:
            own.lease.release()


def _thresholds(expiry: Expiry) -> Thresholds:
    """Return the thresholds of the refresh that expired a group in Redis."""
    most = (expiry.max_staleness, expiry.max_token_staleness)
    return Thresholds(*(None if own is None or own >= NEVER else own + 1 for own in most))


def _expire_late(group: Sequence[Unpacked], train_step: int, thresholds: Thresholds) -> None:
    """Do to a group what the cut that expired it in Redis left to its reader."""
    states = [rollout.state for rollout in group]
    refresh(states, train_step)
    expire(expired_members(states, train_step, thresholds))


def _refresh_late(group: Sequence[Unpacked], train_step: int) -> None:
    """Write the staleness as of the last refresh, unless the group was put at a later step."""
    refresh(
        [
            rollout.state
            for rollout in group
            if rollout.train_step is None or rollout.train_step <= train_step
        ],
        train_step,
    )
