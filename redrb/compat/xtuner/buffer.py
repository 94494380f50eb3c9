"""`ReplayBuffer`: the object that users hold, over all tasks of a namespace."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from inspect import isawaitable
from pathlib import Path
from typing import Any, Self, TypeVar

from redrb.checks import checked_int_or_none
from redrb.compat.xtuner import saving
from redrb.compat.xtuner.executor import ReplayExecutor
from redrb.compat.xtuner.rollout_fields import (
    check_declared,
    checked_status,
    fields_of,
    read,
    write,
)
from redrb.compat.xtuner.rollout_packing import pack_group, unpack_group
from redrb.compat.xtuner.staleness import (
    AGEING,
    Thresholds,
    end,
    expire,
    fill_steps,
    group_status,
    too_stale,
    version_to_order_by,
    write_staleness,
)
from redrb.compat.xtuner.taking import Taker, acknowledge, release
from redrb.compat.xtuner.tasks import BufferSettings, Ends, OnDiscard, ReplayOrder, Tasks
from redrb.connection import Client
from redrb.errors import ConfigError, DecodeError
from redrb.experience import BufferItem, Status
from redrb.experience.records import Scalar
from redrb.stream.options import LEASE_MS
from redrb.stream.take.part import Expiry
from redrb.stream.take.rollout_reading import ROLLOUT
from redrb.stream.task.settings import NO_BOUND

_log = logging.getLogger("redrb")

T = TypeVar("T")

THREADS = 4
"""Calls of one buffer that run at the same time; further calls queue."""


class ReplayBuffer:
    """Groups of rollouts of several tasks, put and taken by any number of processes.

    The interface is that of XTuner v1's `ReplayBuffer`. A rollout is a dict, or an object of the
    declared `rollout_type` (such as XTuner's `RolloutState`, a pydantic model), with the fields
    `rollout_id, group_id, status, prompt_ids, tokens, response, response_ids, response_model_steps,
    response_mask, logprobs, reward, error_msg, routed_experts, finish_reason, seq_staleness,
    mm_info, extra_fields, input_ids, labels`. Fields may be missing, and there may be others: every
    field is restored as it was put. A status may be a string or a member of any enum. Redis holds
    no names of classes: other objects and enums in the fields come back as dicts of their fields
    and as values, unless `rollout_type` converts them.

    All calls except `len` run in the buffer's threads, so no event loop is blocked. `get` leases
    groups and removes them once the caller has them; if the process dies before that, they are
    requeued after `lease_ms`.

    Examples:
        >>> async with redrb.ReplayBuffer(client, order="stalest", namespace="run7") as buffer:
        ...     await buffer.put(group, "math", model_step=41, current_train_step=42)
        ...     groups, consumed = await buffer.take_batch({"math": 32})
    """

    def __init__(
        self,
        client: Client,
        *,
        order: ReplayOrder = "fifo",
        namespace: str = "default",
        rollout_type: type | None = None,
        lease_ms: int = LEASE_MS,
        tags: Sequence[str] | None = None,
        limit: int | None = None,
        run: str | None = None,
        on_discard: OnDiscard | None = None,
    ) -> None:
        """Make a buffer, without a request to Redis.

        Args:
            order: "fifo", by arrival, or "stalest": the oldest policy version first, ties by
                arrival. All processes must use the same order.
            rollout_type: Class of the rollouts that `get` returns. A pydantic model is made by its
                `model_validate`, a msgspec Struct by `msgspec.convert`, both with the objects in
                their fields; a dataclass or other class by its constructor, with its fields by
                name. A put of an object of another class is refused. `dict`: objects of every class
                are put, and come back as dicts. None: rollouts are dicts.
            lease_ms: Time without a heartbeat after which groups that no caller has got yet are
                requeued.
            tags: Names of the tags that `put` stores and that `get` and `count` filter by, of all
                tasks. None: those that other processes have declared.
            limit: Most groups that a task holds, in all statuses; `put` waits beyond it. None: the
                limit of another process is not waited for, and a full task is an error.
            run: Name of the run that the groups are of. A call is refused while there are groups
                of another run; groups of no run are taken over. "": a new run, or that of the save
                which is resumed. None: groups of every run are put and taken.
            on_discard: Function or coroutine function that gets the groups which a call of this
                buffer has discarded, all at once, with status EXPIRED and not reset yet. It
                releases what other systems hold for them: with XTuner's trace store,
                `release_and_discard_rollout_groups`. If `refresh_staleness` fails half-way, it may
                get groups that the next refresh discards again; a cancelled call may leave it out.

        Raises:
            ConfigError: The client or an option cannot be used.
        """
        settings = BufferSettings(
            order=order,
            namespace=namespace,
            rollout_type=rollout_type,
            lease_ms=lease_ms,
            tags=tags,
            limit=limit,
            run=run,
            on_discard=on_discard,
        )
        self._tasks = Tasks(client, settings)
        self._rollout_type = rollout_type
        self._taker = Taker(self._tasks, rollout_type)
        self._on_discard = on_discard
        self._newest_train_step = 0
        self._executor = ReplayExecutor(THREADS, "redrb-replay")
        self._putting: dict[str, ReplayExecutor] = {}  # of tasks with a limit: a thread for each

    def __repr__(self) -> str:
        tasks = self._tasks
        return f"<redrb.ReplayBuffer {tasks.namespace} ({tasks.order}) at {tasks.client.where}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __len__(self) -> int:
        """Return the number of waiting groups over all tasks and statuses.

        It blocks for some requests to Redis for each task: in an event loop use `size`. If it is
        the first call of a process whose run goes on, it returns 0, as XTuner's managers expect
        when they resume a checkpoint without a buffer.

        Raises:
            ConfigError: The buffer holds groups of another run.
        """
        return 0 if self._tasks.enter() else self._tasks.total()

    async def size(self) -> int:
        """Return the number of waiting groups, without blocking the event loop."""
        return await self._executor.run(self._tasks.total)

    async def put(
        self,
        items: Sequence[Any],
        task_name: str,
        *,
        model_step: int | None = None,
        current_train_step: int | None = None,
        stale_threshold: int | None = None,
        token_stale_threshold: int | None = None,
        expired_groups_retryable: bool = True,
        **tags: Scalar | None,
    ) -> None:
        """Store one group exactly once, under the status that follows from its rollouts.

        The caller's rollouts are updated in place: missing steps are filled, staleness is written,
        and rollouts that expire on arrival are reset. Do not change them until this returns; after
        an error of the store or of a field they are as they were before. If the call is cancelled
        after it has begun, the group is stored all the same; if it is cancelled while it waits for
        room, the group is not stored, unless room came at that moment.

        With a `limit`, puts of one task are stored one after the other in the order of the calls.

        Args:
            items: Rollouts of one prompt; an empty group is ignored.
            model_step: Model step of response tokens that have no step.
            current_train_step: The trainer's step, from which staleness is computed, unless the
                group has failed or was filtered. None: the rollouts keep their `seq_staleness`, and
                none expires.
            stale_threshold: Staleness at which a rollout expires, and its group with it.
            token_stale_threshold: A rollout expires when all tokens that count are this stale;
                groups with `input_ids` or `labels` skip this rule.
            expired_groups_retryable: Whether an expired group waits under EXPIRED for new
                responses; otherwise it is discarded, and its rollouts lose their prompts too. This
                holds for a group, too, that was expired before and is put again.
            tags: Values of the declared tags, such as `source="gsm8k"`.

        Raises:
            RecordError: A field cannot be stored, or a rollout is an object and not of
                `rollout_type`; the group was not stored.
            ConfigError: A name or threshold cannot be used, or a tag is not declared.
            TaskMismatch: The task exists with another order, limit or other tags.
            StoreFull: The server's memory limit is reached; or the task is full, and this buffer
                has no `limit` or was closed.
            StoreUnavailable: Redis could not be reached; `uncertain` says whether the group may
                be stored.
        """
        group = list(items)
        fills = checked_int_or_none("model_step", model_step)
        train_step = checked_int_or_none("current_train_step", current_train_step)
        thresholds = Thresholds(stale_threshold, token_stale_threshold)

        def stored() -> bool:
            for rollout in group:
                check_declared(rollout, self._rollout_type)
            before = [
                {**rollout} if isinstance(rollout, dict) else fields_of(rollout)
                for rollout in group
            ]
            try:
                return changed_and_stored()
            except BaseException:
                for rollout, fields in zip(group, before, strict=True):
                    _restore(rollout, fields)
                raise

        def changed_and_stored() -> bool:
            if fills is not None:
                fill_steps(group, fills)
            status = group_status(group)
            if train_step is not None:
                for rollout in group if status in AGEING else ():
                    if isinstance(rollout, dict):
                        rollout.setdefault("seq_staleness", 0)
                write_staleness(group, train_step)
                self._newest_train_step = max(self._newest_train_step, train_step)
            stale = too_stale(group, train_step, thresholds)
            status = Status.EXPIRED if stale else status
            stream = self._tasks.open(task_name)
            if status is Status.EXPIRED and not expired_groups_retryable:
                end(group, train_step)
                stream.discard_expired(1)
                return False
            version = version_to_order_by(group, train_step, self._newest_train_step)
            expire(stale)
            stream.put(
                pack_group(group),
                status=status,
                priority=-version if self._tasks.order == "stalest" else None,
                tags=tags or None,
            )
            return True

        if not group:
            return
        if self._tasks.settings.limit is None:
            kept = await self._executor.run(stored)
        else:
            if self._executor.closed:
                raise ConfigError("the buffer is closed: make another one.")
            if task_name not in self._putting:
                self._putting[task_name] = ReplayExecutor(1, "redrb-replay-put")
            kept = await self._putting[task_name].run_stoppable(stored)
        if not kept:
            await self._tell([group])
            expire(group, for_good=True)

    async def get(
        self, batch_size: int, task_name: str, group_status: object, **where: Any
    ) -> list[list[Any]]:
        """Remove and return up to `batch_size` groups of one status, in the buffer's order.

        If the call is cancelled, its groups are requeued. Groups that a stream has put into the
        task are passed over, and stay where they are.

        Args:
            batch_size: Most groups to return; fewer may wait, and 0 returns none.
            group_status: A `redrb.Status`, its name, or a member of an enum with the same values.
            where: Conditions on declared tags, such as `source="gsm8k", scores_gt=0.8`; see
                docs/reference/selection.md.

        Raises:
            ConfigError: A tag is not declared; or `rollout_type` does not take the fields of a
                rollout. The groups stay stored.
            StoreUnavailable: Redis could not be reached.
        """
        taken = await self._take({task_name: batch_size}, checked_status(group_status), where)
        return taken[task_name]

    async def take_batch(
        self, task_batch_sizes: Mapping[str, int], *, group_status: object = Status.COMPLETED
    ) -> tuple[dict[str, list[list[Any]]], dict[str, int]]:
        """Remove and return groups of several tasks; if the call is cancelled, all are requeued.

        Args:
            task_batch_sizes: Task -> most groups to return; fewer may wait.
            group_status: As for `get`.

        Returns:
            Task -> groups, and task -> number of groups.
        """
        taken = await self._take(task_batch_sizes, checked_status(group_status))
        return taken, {task: len(groups) for task, groups in taken.items()}

    async def count(self, task_name: str, group_status: object, **where: Any) -> int:
        """Return the number of groups of one status that wait in a task.

        Args:
            group_status: As for `get`.
            where: Conditions on declared tags, as for `get`.
        """
        status = checked_status(group_status)
        return await self._executor.run(lambda: self._tasks.count(task_name, status, where or None))

    async def count_statuses(
        self, task_names: Collection[str], statuses: Collection[T]
    ) -> dict[str, dict[T, int]]:
        """Return task -> status, as the caller gave it -> number of waiting groups."""
        known_as = {status: checked_status(status) for status in statuses}
        count = self._tasks.count
        return await self._executor.run(
            lambda: {
                task: {status: count(task, known) for status, known in known_as.items()}
                for task in task_names
            }
        )

    async def is_ready(
        self, task_batch_sizes: Mapping[str, int], *, group_status: object = Status.COMPLETED
    ) -> bool:
        """Return whether at least the given number of groups waits in every task."""
        status = checked_status(group_status)
        sizes = {task: size for task, size in task_batch_sizes.items() if size > 0}
        count = self._tasks.count
        return await self._executor.run(
            lambda: all(count(task, status) >= size for task, size in sizes.items())
        )

    async def refresh_staleness(
        self,
        task_stale_thresholds: Mapping[str, int | None],
        *,
        task_token_stale_thresholds: Mapping[str, int | None] | None = None,
        expired_groups_retryable_by_task: Mapping[str, bool] | None = None,
        current_train_step: int | None,
        statuses: Collection[object] | None = None,
    ) -> dict[str, int]:
        """Expire groups that have become too stale; the cost grows with the expired groups only.

        In groups that are expired already, rollouts that were still fresh may expire, too; groups
        that are not retryable are discarded.

        Args:
            task_stale_thresholds: Task -> `stale_threshold` of `put`.
            task_token_stale_thresholds: Task -> `token_stale_threshold` of `put`.
            expired_groups_retryable_by_task: Task -> `expired_groups_retryable` of `put`; default:
                True.
            current_train_step: The trainer's step; None: no group ages.
            statuses: Statuses of groups that age; default: completed, aborted and expired. Groups
                of other statuses never do.

        Returns:
            Task -> number of expired groups, with those of `statuses` that were expired before.
        """
        tokens = task_token_stale_thresholds or {}
        retryable = expired_groups_retryable_by_task or {}
        rules = {
            task: Thresholds(task_stale_thresholds.get(task), tokens.get(task))
            for task in dict.fromkeys([*task_stale_thresholds, *tokens])
        }
        train_step = checked_int_or_none("current_train_step", current_train_step)
        asked = AGEING if statuses is None else set(map(checked_status, statuses))
        ageing = [status for status in AGEING if status in asked]
        discarded: list[list[Any]] = []

        def note_discarded(items: list[BufferItem]) -> None:
            if ROLLOUT in items[0].extras:  # else a stream has put it
                try:
                    discarded.append(self._taker.discarded(unpack_group(items), train_step))
                except DecodeError as error:  # it is discarded all the same
                    _log.error("on_discard is not told of a group: %s", error)

        def refresh_one(task: str, rule: Thresholds) -> int:
            stream = self._tasks.find(task)
            if stream is None:
                return 0
            keeps, expired, hook = retryable.get(task, True), 0, self._on_discard
            if Status.EXPIRED in ageing and keeps:
                expired = self._tasks.count(task, Status.EXPIRED)
            elif Status.EXPIRED in ageing:
                for groups in self._taker.discard_expired(task, train_step):
                    expired += len(groups)
                    discarded.extend(groups if hook is not None else ())
            if train_step is None:
                return expired
            ends: Ends = "keep"
            if not keeps:
                ends = "discard" if hook is None else note_discarded
            refresh = Expiry(
                train_step - 1,  # on-policy, the train step is one ahead of the model step
                None if rule.sequence is None else rule.sequence - 1,
                NO_BOUND if rule.token is None else rule.token - 1,
            )
            return expired + self._tasks.refresh(stream, refresh, ageing, ends)

        def refresh() -> dict[str, int]:
            self._newest_train_step = max(self._newest_train_step, train_step or 0)
            return {task: refresh_one(task, rule) for task, rule in rules.items()}

        try:
            return await self._executor.run(refresh)
        finally:
            await self._tell(discarded)

    async def save(self, path: str | Path) -> None:
        """Write all waiting groups into a directory, which is made if it does not exist.

        Tasks are written one after the other: pause puts and gets for a save of one moment. Tasks
        that Redis has lost, and into which nothing was put since, are left out with a warning.

        Args:
            path: The directory; an earlier save in it is replaced.

        Raises:
            ConfigError: The directory cannot be written to; an earlier save is unchanged.
            StoreUnavailable: Redis could not be reached; an earlier save is unchanged.
            StoreError: Redis has lost every task of the buffer; an earlier save is unchanged.
        """
        await self._executor.drain()  # groups that callers have got are removed first
        await self._executor.run(lambda: saving.save(self._tasks, Path(path)))

    async def resume(self, path: str | Path) -> None:
        """Fill this empty buffer from a save; groups keep their order and all fields.

        A buffer with a `run` goes on with what Redis holds, and logs how much, if that is of the
        save's run or of its own: nothing is put then. To go back to the save all the same, delete
        the tasks first.

        Tasks are filled one after the other, each group once. A call that broke off is repeated,
        and goes on; after a success, if nothing was put or taken since, it changes nothing. Groups
        that other processes put or take meanwhile are put and taken beside.

        Raises:
            ConfigError: The buffer is not empty, or holds groups of another run; the save is of
                another order, or there is none; a task was deleted meanwhile.
            DecodeError: The save is malformed or of another redrb.
            StoreUnavailable: Redis stayed away; the same call goes on.
        """
        await self._executor.drain()
        await self._executor.run(lambda: saving.resume(self._tasks, Path(path)))

    async def close(self) -> None:
        """Refuse further calls, finish those that have begun, and close the streams.

        Puts that wait for room raise StoreFull. The client stays open.
        """
        self._executor.closed = True
        for putting in self._putting.values():
            putting.stop()
            await putting.close()
        await self._executor.close(self._tasks.close)

    async def _tell(self, discarded: list[list[Any]]) -> None:
        """Call `on_discard` with groups that were discarded, and wait for it."""
        if self._on_discard is not None and discarded:
            told = self._on_discard(discarded)
            if isawaitable(told):
                await told

    async def _take(
        self, sizes: Mapping[str, int], status: Status, where: Mapping[str, Any] | None = None
    ) -> dict[str, list[list[Any]]]:
        """Take groups of several tasks; they are acknowledged once the caller has them."""
        taken = await self._executor.run_undoable(
            lambda: self._taker.take(sizes, status, where or None),
            undo=release,
            confirm=acknowledge,
        )
        return {task: each.groups for task, each in taken.items()}


def _restore(rollout: Any, fields: dict[str, Any]) -> None:
    """Give the caller's rollout the fields back that it had before a put that has failed."""
    if isinstance(rollout, dict):
        rollout.clear()
        rollout.update(fields)
        return
    for name, value in fields.items():
        if read(rollout, name) is not value:
            write(rollout, name, value)
