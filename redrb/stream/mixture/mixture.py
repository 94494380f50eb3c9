"""`Mixture`: batches from several tasks, in ratios that hold exactly."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from redrb.checks import checked_int
from redrb.connection import Client
from redrb.errors import BatchTimeout, LeaseLost, StoreError, StoreUnavailable
from redrb.stream import ExperienceStream, Lease
from redrb.stream.mixture import turns
from redrb.stream.mixture.lease import MixtureLease
from redrb.stream.mixture.ratio import Ratio
from redrb.stream.mixture.starvation import Starvation, starved
from redrb.stream.mixture.turn_timeout import Patience
from redrb.stream.mixture.turns import Answer, Operation, Turns
from redrb.stream.take.heartbeat import Heartbeat
from redrb.stream.waiting import SHORT_OUTAGE_S

MOST_GROUPS = 1 << 20
"""Most groups a take: what the script multiplies stays below 2**53."""

_log = logging.getLogger("redrb")


class Mixture:
    """Several tasks from which one batch is taken, in given ratios.

    After every take, by whichever process of the same consumer group, the groups taken of each task
    differ from its weight times all groups taken by less than one. A take that fails does not
    count. For that the takes of a mixture go one after the other, in the order of their arrival:
    while one waits for a task that starves, the others wait behind it, and one batch at most is
    held idle. The count belongs to the consumer group and the ratio, whatever scale the weights
    have; it is forgotten 30 days after the last take.

    One object may be shared by threads, and used on both sides of a fork.

    Example:
        >>> with Mixture(client, {"math": 0.7, "code": 0.3}) as mixture:
        ...     with mixture.take(32, timeout=600) as lease:
        ...         train(lease.batch(), lease.sample_tasks)
    """

    def __init__(
        self,
        client: Client,
        weights: Mapping[str, float],
        *,
        namespace: str = "default",
        group: str = "default",
        lease_ms: int = 30_000,
    ) -> None:
        """Open the tasks; those that are new are created.

        Args:
            client: What `redrb.connect` returned.
            weights: Task -> its share, positive, in any scale.
            namespace: Of all the tasks.
            group: Consumer group, in all the tasks.
            lease_ms: Silence of this consumer's heartbeat after which others take its leases over.

        Raises:
            ConfigError: A bad name, weight or setting.
            StoreUnavailable: Redis stayed away.
        """
        self._ratio = Ratio.of(weights)
        self.namespace = namespace
        self.group = group
        self._streams = {
            task: ExperienceStream(
                client, task, namespace=namespace, group=group, lease_ms=lease_ms
            )
            for task in self._ratio.parts
        }
        self._turns = Turns(client, namespace, group, self._ratio)
        self._begin()

    def _begin(self) -> None:
        """Become a caller that Redis does not know yet: at first, and in a forked process."""
        self._pid = os.getpid()
        self._idle: deque[Operation] = deque()
        self._owed: deque[Operation] = deque()
        self._holding: dict[str, Operation] = {}
        self._lock = threading.Lock()
        self._heartbeat: Heartbeat | None = None

    def __repr__(self) -> str:
        return f"<redrb.Mixture {self.namespace}: {self._ratio}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def weights(self) -> dict[str, float]:
        """Task -> its share; they add up to 1."""
        return self._ratio.weights

    def take(
        self, count: int, *, timeout: float | None = None, ack: MixtureLease | None = None
    ) -> MixtureLease:
        """Lease exactly `count` groups of all tasks together, or none.

        Args:
            count: Groups in the batch, 1 to 2**20.
            timeout: Seconds to wait for a full batch; 0 only looks; None waits for ever, and logs
                every half minute what is missing.
            ack: The lease before this one: it is acknowledged first, also when the take itself
                times out. This saves no round trip.

        Returns:
            A lease; `lease.batch()` pads the samples of all tasks to one batch.

        Raises:
            BatchTimeout: `task` names the task, or tasks, that had too few groups in time; `wanted`
                and `available` are theirs. None was taken of any task.
            LeaseLost: Another consumer has groups of `ack` by now; nothing was taken.
            ConfigError: A task's limit is below its share, so the batch could never be full.
            StoreUnavailable: Redis stayed away.
        """
        count = checked_int("count", count, 1, MOST_GROUPS)
        if ack:
            ack.ack()
        patience = Patience(timeout)
        while True:
            lease = self._attempt(count, patience)
            if lease is not None:
                return lease

    def taken(self) -> dict[str, int]:
        """Return how many groups all takes of this mixture have taken of each task.

        Groups that came back from a lease and were taken again count again.
        """
        return {task: figures.taken for task, figures in self._turns.look().items()}

    def starvation(self) -> dict[str, Starvation]:
        """Return for each task how takes have waited for it, in all processes."""
        return {
            task: Starvation(figures.short, figures.waited_s, figures.waiting_s)
            for task, figures in self._turns.look().items()
        }

    def close(self) -> None:
        """Stop the heartbeats and give back what is still leased. The client stays open."""
        if self._pid == os.getpid():
            with self._lock:
                heartbeat, self._heartbeat = self._heartbeat, None
            if heartbeat is not None:
                heartbeat.stop()
            with suppress(StoreError):
                self._settle(SHORT_OUTAGE_S)
        for stream in self._streams.values():
            stream.close()

    def _attempt(self, count: int, patience: Patience) -> MixtureLease | None:
        """Take once; None when the turn was lost meanwhile, since this process stood still."""
        operation = self._operation(count)
        parts: dict[str, Lease] = {}
        kept = False
        try:
            self._await_turn(operation, patience)
            self._take_shares(operation, parts, patience)
            kept = self._turns.keep(operation, retry_s=patience.retry_s)
        finally:
            self._holding.pop(operation.caller, None)
            if kept:
                self._idle.append(operation)
            else:
                self._give_back(operation, parts)
        return MixtureLease(parts) if kept else None

    def _operation(self, count: int) -> Operation:
        """Return an operation that nobody else uses."""
        if self._pid != os.getpid():
            self._begin()
        self._settle(None)
        try:
            operation = self._idle.pop()
        except IndexError:
            operation = Operation()
        operation.begin(count)
        return operation

    def _await_turn(self, operation: Operation, patience: Patience) -> None:
        """Wait until it is the operation's turn, and note its split."""
        while True:
            queue = not patience.exhausted
            answer = self._turns.ask(operation, queue=queue, retry_s=patience.retry_s)
            if answer.granted:
                operation.shares = answer.shares
                self._hold(operation)
                return
            if not queue or (patience.over and answer.waits_for):
                raise self._behind(operation, answer, patience)
            self._wait_behind(operation, answer, patience)

    def _wait_behind(self, operation: Operation, answer: Answer, patience: Patience) -> None:
        """Wait for a while; the time goes to the task that the call before waits for."""
        since = patience.waited_s
        if answer.waits_for:
            patience.tell(
                f"mixture {self._ratio}, consumer group {self.group!r}: the take before this one "
                f"waits for task {answer.waits_for!r}"
            )
        self._turns.wait(operation, patience.slice_for_turn(starving=bool(answer.waits_for)))
        if answer.waits_for:
            operation.waited(answer.waits_for, patience.waited_s - since)

    def _behind(self, operation: Operation, answer: Answer, patience: Patience) -> BatchTimeout:
        """Return the error of an operation that never had its turn."""
        if answer.waits_for:
            operation.waited(answer.waits_for, 0.0)
            wanted = {answer.waits_for: answer.need}
        else:
            wanted = answer.shares
        short = {task: (self._streams[task].count(), need) for task, need in wanted.items()}
        of = f"An earlier take from the mixture {self._ratio} has not ended: it wants these."
        return starved(short, of, waited_s=patience.waited_s)

    def _take_shares(
        self, operation: Operation, parts: dict[str, Lease], patience: Patience
    ) -> None:
        """Lease what the operation takes, task by task, always in the same order.

        So two mixtures with tasks in common never wait for what the other one holds.
        """
        for task, share in operation.shares.items():
            if share:
                try:
                    parts[task] = self._take_share(task, operation, patience)
                except BatchTimeout as error:
                    raise self._short(operation, parts, error, patience) from error

    def _take_share(self, task: str, operation: Operation, patience: Patience) -> Lease:
        """Lease the operation's share of one task."""
        stream, share = self._streams[task], operation.shares[task]
        try:
            return stream.take(share, timeout=0)
        except (BatchTimeout, StoreUnavailable) as error:
            if isinstance(error, BatchTimeout):
                operation.waited(task, 0.0)
            if patience.over:
                raise
        self._turns.hold(operation, waits_for=task, retry_s=patience.retry_s)
        since = patience.waited_s
        try:
            return stream.take(share, timeout=patience.left_s)
        finally:
            operation.waited(task, patience.waited_s - since)

    def _short(
        self,
        operation: Operation,
        parts: Mapping[str, Lease],
        error: BatchTimeout,
        patience: Patience,
    ) -> BatchTimeout:
        """Return the error that names every task that had too few groups."""
        short = {error.task: (error.available, error.wanted)}
        for task, share in operation.shares.items():
            if share and task not in parts and task not in short:
                available = self._streams[task].count()
                if available < share:
                    short[task] = (available, share)
                    operation.waited(task, 0.0)
        of = f"To take {operation.count} groups from the mixture {self._ratio}."
        return starved(short, of, waited_s=patience.waited_s, first=error)

    def _hold(self, operation: Operation) -> None:
        """Keep the turn while the operation goes on, however long that takes."""
        self._holding[operation.caller] = operation
        with self._lock:
            if self._heartbeat is None:
                self._heartbeat = Heartbeat(self._beat, turns.TURN_MS / 3000, "mixture")

    def _beat(self) -> None:
        for operation in list(self._holding.values()):
            self._turns.hold(operation, retry_s=SHORT_OUTAGE_S)

    def _give_back(self, operation: Operation, parts: dict[str, Lease]) -> None:
        """End an operation that failed: what it leased goes back, and nothing of it counts."""
        for task, part in parts.items():
            try:
                part.release()
            except (LeaseLost, StoreError) as error:
                _log.warning("task %r: a part of a batch goes back later: %s", task, error)
        parts.clear()  # what was not released is dropped, and the heartbeat gives it back
        self._owed.append(operation)
        try:
            self._settle(SHORT_OUTAGE_S)
        except StoreError as error:
            _log.warning("mixture %s: a take that failed may count for now: %s", self._ratio, error)

    def _settle(self, retry_s: float | None) -> None:
        """Tell Redis of operations that failed; those that it could not be told wait."""
        while True:
            try:
                operation = self._owed.popleft()
            except IndexError:
                return
            try:
                self._turns.give(operation, retry_s=retry_s)
            except BaseException:
                self._owed.append(operation)
                raise
            self._idle.append(operation)
