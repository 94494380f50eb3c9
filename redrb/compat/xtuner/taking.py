"""Takes groups of rollouts of several tasks; each call blocks until Redis answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from redrb.compat.xtuner.object_refs import putting_back
from redrb.compat.xtuner.rollout_fields import as_declared
from redrb.compat.xtuner.rollout_packing import unpack_group
from redrb.compat.xtuner.staleness import Thresholds, end, expire, expired_members, write_staleness
from redrb.compat.xtuner.tasks import Tasks
from redrb.errors import BatchTimeout, DecodeError, RedrbError
from redrb.experience import Status
from redrb.stream import Lease
from redrb.stream.take.part import Expiry
from redrb.stream.take.rollout_reading import is_rollouts
from redrb.stream.task.settings import NO_BOUND
from redrb.words import counted

_log = logging.getLogger("redrb")

DISCARDED = 32
"""Groups that are leased at a time to be discarded."""


class TakenGroups(NamedTuple):
    """Groups of one task on their way to the caller, and their leases."""

    groups: list[list[Any]]
    leases: tuple[Lease, ...]


class Taker:
    """Takes groups of rollouts; safe among threads."""

    def __init__(self, tasks: Tasks, rollout_type: type | None) -> None:
        self._tasks = tasks
        self._rollout_type = rollout_type

    def take(
        self, sizes: Mapping[str, int], status: Status, where: Mapping[str, Any] | None = None
    ) -> dict[str, TakenGroups]:
        """Lease groups of several tasks; after an error none is leased."""
        taken: dict[str, TakenGroups] = {}
        try:
            with putting_back():
                for task, size in sizes.items():
                    taken[task] = self._take_one(task, size, status, where, self._made)
        except BaseException:
            release(taken)
            raise
        return taken

    def discard_expired(self, task: str, train_step: int | None) -> Iterator[list[list[Any]]]:
        """End all groups that wait as expired, and yield some at a time."""

        def made(group: list[dict[str, Any]]) -> list[Any]:
            return self.discarded(group, train_step)

        while (taken := self._take_one(task, DISCARDED, Status.EXPIRED, None, made)).groups:
            for lease in taken.leases:
                lease.expire()
            yield taken.groups

    def discarded(self, group: list[dict[str, Any]], train_step: int | None) -> list[Any]:
        """Return the rollouts of a group that is discarded as its hook gets them."""
        end(group, train_step)
        return self._made(group)

    def _made(self, group: Sequence[dict[str, Any]]) -> list[Any]:
        return [as_declared(self._rollout_type, each) for each in group]

    def _take_one(
        self,
        task: str,
        size: int,
        status: Status,
        where: Mapping[str, Any] | None,
        made: Callable[[list[dict[str, Any]]], list[Any]],
    ) -> TakenGroups:
        """Lease rollouts; groups that a stream has put stay where they are, and are passed over."""
        stream = self._tasks.find(task) if size > 0 else None
        groups: list[list[Any]] = []
        taken: list[tuple[Lease, list[int]]] = []
        if stream is None:
            return TakenGroups(groups, ())
        try:
            while len(groups) < size:
                try:
                    lease = stream.take(
                        size - len(groups), timeout=0, at_least=1, status=status, where=where
                    )
                except BatchTimeout:
                    break
                others = [seq for seq, each in lease.layouts.items() if not is_rollouts(each)]
                taken.append((lease, others))  # others stay leased, so that they are not met again
                groups += map(made, self._read(task, lease, status, others))
                if not others:
                    break
            for lease, others in taken:
                if others:
                    lease.release(others)
        except BaseException:
            for lease, _ in taken:
                if lease:
                    lease.release()
            raise
        passed = sum(len(others) for _, others in taken)
        if passed:
            _log.warning(
                "task %r: a ReplayBuffer passes over %s that a stream has put: "
                "take them with a stream, or use another task",
                task,
                counted(passed, "group"),
            )
        return TakenGroups(groups, tuple(lease for lease, _ in taken if lease))

    def _read(
        self, task: str, lease: Lease, status: Status, others: Collection[int]
    ) -> Iterator[list[dict[str, Any]]]:
        """Yield the groups of a lease, as the refreshes since their put or expiry have left them.

        Malformed rollouts are rejected, so that the next take does not meet them again.
        """
        refreshed = self._tasks.refreshed(task, status, lease.ids)
        for seq, items in zip(lease.ids, lease.groups(), strict=True):
            if seq in others:
                continue
            try:
                group = unpack_group(items)
            except DecodeError as error:
                _log.error("task %r: group %d: %s", task, seq, error)
                lease.reject(str(error), [seq])
                continue
            expiry = lease.expiries.get(seq)
            if expiry is not None:
                _age(group, expiry)
            for refresh in refreshed.get(seq, ()):
                if expiry is None or refresh.number > expiry.number:
                    _age(group, refresh)
            yield group


def release(taken: Mapping[str, TakenGroups]) -> None:
    """Requeue groups that were taken."""
    _end(taken, Lease.release)


def acknowledge(taken: Mapping[str, TakenGroups]) -> None:
    """Remove groups that were taken."""
    _end(taken, Lease.ack)


def _end(taken: Mapping[str, TakenGroups], end: Callable[[Lease], None]) -> None:
    for each in taken.values():
        for lease in each.leases:
            try:
                end(lease)
            except RedrbError as error:
                _log.warning("groups that were taken may be returned again: %s", error)


def _age(group: Sequence[dict[str, Any]], expiry: Expiry) -> None:
    """Do to the rollouts of a group what a refresh has noted in Redis, which cannot change them."""
    limits = (expiry.max_staleness, expiry.max_token_staleness)
    thresholds = Thresholds(
        *(None if most is None or most >= NO_BOUND else most + 1 for most in limits)
    )
    train_step = expiry.current_version + 1
    write_staleness(group, train_step)
    expire(expired_members(group, train_step, thresholds))
