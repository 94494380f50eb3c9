"""`ReplayBuffer`: what users hold of the replay of all tasks of a namespace."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from redrb.connection import Client
from redrb.experience import Status
from redrb.replay import saving
from redrb.replay.executor import ReplayExecutor
from redrb.replay.operations import Arrival, Operations, release
from redrb.replay.rollout_classes import RolloutClasses
from redrb.replay.rollout_fields import checked_status, checked_step
from redrb.replay.staleness import Thresholds
from redrb.replay.tasks import ReplayOrder, Tasks

T = TypeVar("T")

THREADS = 4
"""Calls of one buffer that may be on their way at once; further ones queue."""

REFRESHED = (Status.COMPLETED, Status.ABORTED)


class ReplayBuffer:
    """Groups of rollouts of several tasks, put and taken by any number of processes.

    The interface is that of XTuner v1's `ReplayBuffer`. A rollout is a dict, or an object of a
    class of your own (dataclass, pydantic model, plain object), with the fields of XTuner's
    `RolloutState`: `rollout_id, group_id, status, prompt_ids, tokens, response, response_ids,
    response_model_steps, response_mask, logprobs, reward, error_msg, routed_experts, finish_reason,
    seq_staleness, mm_info, extra_fields, input_ids, labels`. It may lack some and have others:
    every field comes back as it was. A status may be a string or a member of any enum.

    All calls but `len` run in a few threads of the buffer's own: no event loop is blocked. What
    `get` returned is removed once it is in the caller's hands; a process that dies before that
    gives it back after `lease_ms`.

    Example:
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
        lease_ms: int = 30_000,
    ) -> None:
        """Make a buffer; nothing is asked of Redis yet.

        Args:
            client: What `redrb.connect` returned.
            order: "fifo", by arrival, or "stalest": the oldest policy version first, ties by
                arrival. All processes must give the same.
            namespace: Keeps experiments on one server apart.
            rollout_type: What rollouts are rebuilt as, for processes that read what others put;
                `dict` gives dicts. None: the class that this process put itself.
            lease_ms: Silence of this process after which what it took and nobody got goes back.

        Raises:
            ConfigError: A bad client, order or namespace.
        """
        self._tasks = Tasks(client, namespace, order, lease_ms)
        self._operations = Operations(self._tasks, RolloutClasses(rollout_type))
        self._executor = ReplayExecutor(THREADS, "redrb-replay")

    def __repr__(self) -> str:
        tasks = self._tasks
        return f"<redrb.ReplayBuffer {tasks.namespace} ({tasks.order}) at {tasks.client.where}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __len__(self) -> int:
        """Return how many groups wait, over all tasks and statuses.

        It asks Redis once a task and waits for the answers: in an event loop use `size`.
        """
        return self._tasks.total()

    async def size(self) -> int:
        """Return what `len` returns, without blocking the event loop."""
        return await self._executor.do(self._tasks.total)

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
    ) -> None:
        """Store one group, under the status that its rollouts' make, exactly once.

        The caller's own rollouts are brought up to date: missing steps are filled, staleness is
        written, and those that expire on arrival are reset. Do not change them until this returns.
        Cancelled, a put that was begun is finished all the same.

        Args:
            items: Rollouts of one prompt; empty is a no-op.
            task_name: Name of the task.
            model_step: Step of the model that made the response tokens without a step.
            current_train_step: The trainer's step, from which staleness follows; None: the
                rollouts' own `seq_staleness` stands, and tokens have no staleness.
            stale_threshold: Staleness from which on a rollout expires, and its group with it.
            token_stale_threshold: Staleness of all tokens that count from which on a rollout
                expires; groups with `input_ids` or `labels` skip this rule.
            expired_groups_retryable: Whether a group that expires waits under EXPIRED for new
                responses; otherwise it is discarded, and its rollouts lose their prompts too.

        Raises:
            RecordError: A field holds what cannot be stored; the group was not stored.
            ConfigError: A bad name or threshold.
            TaskMismatch: The task exists with another order.
            StoreFull: The server's memory limit is reached.
            StoreUnavailable: Redis stayed away; `uncertain` says whether it may have landed.
        """
        thresholds = Thresholds(stale_threshold, token_stale_threshold)
        told = Arrival(
            checked_step("model_step", model_step),
            checked_step("current_train_step", current_train_step),
            thresholds,
            expired_groups_retryable,
        )
        group = list(items)
        if group:
            await self._executor.do(lambda: self._operations.put(group, task_name, told))

    async def get(self, batch_size: int, task_name: str, group_status: object) -> list[list[Any]]:
        """Remove up to `batch_size` groups of one status, in this buffer's order, and return them.

        Cancelled, it gives back what it took.

        Args:
            batch_size: Groups wanted; fewer may come, and 0 gives none.
            task_name: Name of the task.
            group_status: A `redrb.Status`, its name, or a member of an enum of the same values.

        Raises:
            ConfigError: The rollouts are of a class that this process does not know: give
                `rollout_type`. They stay stored.
            StoreUnavailable: Redis stayed away.
        """
        taken = await self._take({task_name: batch_size}, checked_status(group_status))
        return taken[task_name]

    async def take_batch(
        self, task_batch_sizes: Mapping[str, int], *, group_status: object = Status.COMPLETED
    ) -> tuple[dict[str, list[list[Any]]], dict[str, int]]:
        """Remove groups of several tasks; cancelled, it gives all of them back.

        Args:
            task_batch_sizes: Task -> groups wanted; fewer may come.
            group_status: As for `get`.

        Returns:
            Task -> its groups, and task -> how many they are.
        """
        taken = await self._take(task_batch_sizes, checked_status(group_status))
        return taken, {task: len(groups) for task, groups in taken.items()}

    async def count(self, task_name: str, group_status: object) -> int:
        """Return how many groups of one status wait in a task."""
        status = checked_status(group_status)
        return await self._executor.do(lambda: self._operations.count(task_name, status))

    async def count_statuses(
        self, task_names: Collection[str], statuses: Collection[T]
    ) -> dict[str, dict[T, int]]:
        """Return task -> status, as it was given -> groups that wait."""
        asked = {status: checked_status(status) for status in statuses}
        count = self._operations.count
        return await self._executor.do(
            lambda: {
                task: {status: count(task, known) for status, known in asked.items()}
                for task in task_names
            }
        )

    async def is_ready(
        self, task_batch_sizes: Mapping[str, int], *, group_status: object = Status.COMPLETED
    ) -> bool:
        """Return whether every task has as many groups of a status as are asked for."""
        status = checked_status(group_status)
        wanted = {task: size for task, size in task_batch_sizes.items() if size > 0}
        count = self._operations.count
        return await self._executor.do(
            lambda: all(count(task, status) >= size for task, size in wanted.items())
        )

    async def refresh_staleness(
        self,
        task_stale_thresholds: Mapping[str, int | None],
        *,
        task_token_stale_thresholds: Mapping[str, int | None] | None = None,
        expired_groups_retryable_by_task: Mapping[str, bool] | None = None,
        current_train_step: int,
        statuses: Collection[object] | None = None,
    ) -> dict[str, int]:
        """Expire what has become too stale; the cost grows with what expires, not what is stored.

        Args:
            task_stale_thresholds: Task -> as for `put`.
            task_token_stale_thresholds: Task -> as for `put`.
            expired_groups_retryable_by_task: Task -> as for `put`; default: retryable.
            current_train_step: The trainer's step.
            statuses: Statuses of groups that may expire; default: completed and aborted.

        Returns:
            Task -> groups that expired.
        """
        tokens = task_token_stale_thresholds or {}
        retryable = expired_groups_retryable_by_task or {}
        rules = {
            task: Thresholds(task_stale_thresholds.get(task), tokens.get(task))
            for task in dict.fromkeys([*task_stale_thresholds, *tokens])
        }
        train_step = checked_step("current_train_step", current_train_step) or 0
        chosen = REFRESHED if statuses is None else tuple(map(checked_status, statuses))
        return await self._executor.do(
            lambda: self._operations.refresh(rules, retryable, train_step, chosen)
        )

    async def save(self, path: str | Path) -> None:
        """Write all groups that wait into a directory, which is made where there is none.

        Tasks are written one after the other: pause puts and gets where they must be of one moment.

        Args:
            path: The directory; an earlier save in it is replaced.

        Raises:
            ConfigError: The directory cannot be written to.
            StoreUnavailable: Redis stayed away.
            Both: an earlier save is still whole.
        """
        await self._executor.settle()  # what was got is gone
        await self._executor.do(lambda: saving.save(self._tasks, Path(path)))

    async def resume(self, path: str | Path) -> None:
        """Fill this buffer, which must be empty, with what was saved: order and fields survive.

        Raises:
            ConfigError: The buffer is not empty, the save is of another order, or there is none;
                nothing was changed.
            DecodeError: It is malformed or of a newer redrb; nothing was changed.
        """
        await self._executor.settle()
        await self._executor.do(lambda: saving.resume(self._tasks, Path(path)))

    async def close(self) -> None:
        """Finish what was begun and close the streams. The client stays open."""
        if self._executor.closed:
            return
        await self._executor.settle()
        await self._executor.do(self._tasks.close)
        self._executor.close()

    async def _take(self, sizes: Mapping[str, int], status: Status) -> dict[str, list[list[Any]]]:
        """Take groups of several tasks; they are acknowledged when the caller has them."""
        taken = await self._executor.fetch(lambda: self._operations.take(sizes, status), release)
        for own in taken.values():
            if own.lease is not None:
                self._executor.start(own.lease.ack, "groups that were got may come again")
        return {task: own.groups for task, own in taken.items()}
