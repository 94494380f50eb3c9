"""`Mixture`: batches from several tasks, in ratios that hold exactly."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from redrb.checks import checked_int
from redrb.connection import Client
from redrb.connection.deadline import GRACE_S, within
from redrb.errors import BatchTimeout, StoreUnavailable
from redrb.stream import ExperienceStream, Lease
from redrb.stream.mixture.lease import MixtureLease
from redrb.stream.mixture.operations import Operations
from redrb.stream.mixture.ratio import Ratio
from redrb.stream.mixture.starvation import Starvation
from redrb.stream.mixture.turn_timeout import TurnTimeout
from redrb.stream.mixture.turns import Operation, Turns
from redrb.stream.take.endings import end_parts
from redrb.stream.take.reading import GroupReader
from redrb.stream.task.settings import LEASE_MS

MOST_GROUPS = 1 << 20
"""Most groups of one take: products in the script stay below 2**53."""

_log = logging.getLogger("redrb")


class Mixture:
    """Several tasks from which one batch is taken, in given ratios.

    After every take, in any process of the same consumer group, the number of groups taken of each
    task differs from its weight times all groups taken by less than one. A take that fails does
    not count. To make this exact, the takes of a mixture run one after the other, in the order of
    their arrival: while one waits for a task that starves, later takes wait behind it, and at most
    one batch is held idle. The count belongs to the consumer group and the ratio, independent of
    the scale of the weights; it is deleted 30 days after the last take.

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
        lease_ms: int = LEASE_MS,
        reader: GroupReader | None = None,
    ) -> None:
        """Open the tasks; new ones are created.

        Args:
            client: Client that `redrb.connect` returned.
            weights: Task -> its share, positive, in any scale.
            namespace: Namespace of all tasks.
            group: Consumer group in all tasks.
            lease_ms: Silence of the heartbeat after which other consumers take its leases over.
            reader: Converts groups that a `ReplayBuffer` has put, as for `ExperienceStream`.

        Raises:
            ConfigError: A bad name, weight or setting.
            StoreUnavailable: Redis stayed away.
        """
        self._ratio = Ratio.of(weights)
        self.namespace = namespace
        self.group = group
        self._streams = {
            task: ExperienceStream(
                client,
                task,
                namespace=namespace,
                group=group,
                lease_ms=lease_ms,
                reader=reader,
            )
            for task in self._ratio.parts
        }
        self._client = client
        self._turns = Turns(client, namespace, group, self._ratio)
        self._begin()

    def _begin(self) -> None:
        """Become a caller that Redis does not know yet: at first, and in a forked process."""
        self._pid = os.getpid()
        self._operations = Operations(self._turns, str(self._ratio))

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
                the shortage every half minute.
            ack: The lease before this one: it is acknowledged first, also when the take times out.
                This saves no round trip.

        Returns:
            A lease; `lease.batch()` pads the samples of all tasks to one batch.

        Raises:
            BatchTimeout: `task` names the task, or tasks, that had too few groups in time; `wanted`
                and `available` are theirs. None was taken of any task.
            LeaseLost: Another consumer has taken groups of `ack` over; nothing was taken.
            ConfigError: A task's limit is below its share, so the batch can never be full.
            StoreUnavailable: Redis stayed away.
        """
        count = checked_int("count", count, 1, MOST_GROUPS)
        wait = TurnTimeout(timeout)
        if self._pid != os.getpid():
            self._begin()
        with wait.deadline(), ExitStack() as scope:
            for stream in self._streams.values():
                scope.enter_context(stream.worker.steps.fetching())
            if ack:
                ack.ack()
            while True:
                lease = self._attempt(count, wait)
                if lease is not None:
                    return lease

    def taken(self) -> dict[str, int]:
        """Return how many groups all takes of this mixture have taken of each task.

        Groups that came back from a lease and were taken again count again.
        """
        return {task: figures.taken for task, figures in self._turns.look().items()}

    def starvation(self) -> dict[str, Starvation]:
        """Return for each task how takes have waited for it, in all processes."""
        return {task: figures.starvation for task, figures in self._turns.look().items()}

    def close(self) -> None:
        """Stop the heartbeats and requeue the groups still leased. The client stays open."""
        with within(self._client.retry_s + GRACE_S), ExitStack() as scope:
            for stream in self._streams.values():  # one that fails keeps no other open
                scope.callback(stream.close)
            if self._pid == os.getpid():
                self._operations.close()

    def _attempt(self, count: int, wait: TurnTimeout) -> MixtureLease | None:
        """Take once; None when the process stood still for so long that it lost the turn."""
        operation = self._operations.begin(count)
        leases: dict[str, Lease] = {}
        kept = False
        try:
            self._await_turn(operation, wait)
            self._take_shares(operation, leases, wait)
            kept = self._turns.keep(operation, retry_s=wait.retry_s)
        finally:
            if not kept:
                _release(leases)
            self._operations.end(operation, kept=kept)
        if not kept:
            return None
        return MixtureLease([part for lease in leases.values() for part in lease.parts])

    def _await_turn(self, operation: Operation, wait: TurnTimeout) -> None:
        """Wait until it is the operation's turn, and note its shares."""
        while True:
            queue = not wait.exhausted
            reply = self._turns.ask(operation, queue=queue, retry_s=wait.retry_s)
            if reply.granted:
                operation.shares = reply.shares
                self._operations.hold(operation)
                return
            starving = bool(reply.waits_for)
            if not queue or (wait.over and starving):
                raise operation.shortages.behind_another_take(
                    str(self._ratio),
                    self.namespace,
                    {reply.waits_for: reply.need} if starving else reply.shares,
                    self._available,
                    wait.waited_s,
                    starving=starving,
                )
            if starving:
                wait.log(
                    f"mixture {self._ratio}, consumer group {self.group!r}: the take before this "
                    f"one waits for task {reply.waits_for!r}"
                )
            with operation.shortages.timed(reply.waits_for, wait):
                self._turns.wait(operation, wait.slice_for_turn(starving=starving))

    def _take_shares(
        self, operation: Operation, leases: dict[str, Lease], wait: TurnTimeout
    ) -> None:
        """Lease the operation's share of each task, always in the same order of tasks.

        So two mixtures with tasks in common never wait for groups that the other one holds.
        """
        for task, share in operation.shares.items():
            if share:
                try:
                    leases[task] = self._take_share(task, operation, wait)
                except BatchTimeout as error:
                    raise operation.shortages.out_of_time(
                        str(self._ratio),
                        operation.shares,
                        leases,
                        self._available,
                        error,
                        wait.waited_s,
                    ) from error

    def _take_share(self, task: str, operation: Operation, wait: TurnTimeout) -> Lease:
        """Lease the operation's share of one task."""
        stream, share = self._streams[task], operation.shares[task]
        try:
            return stream.take(share, timeout=0)
        except (BatchTimeout, StoreUnavailable) as error:
            if isinstance(error, BatchTimeout):
                operation.shortages.add(task)
            if wait.over:
                raise
        self._turns.hold(operation, waits_for=task, retry_s=wait.retry_s)
        with operation.shortages.timed(task, wait):
            return stream.take(share, timeout=wait.left_s)

    def _available(self, task: str) -> int:
        return self._streams[task].count()


def _release(leases: dict[str, Lease]) -> None:
    """Requeue the groups of a take that failed."""
    parts = [(part, part.ids) for lease in leases.values() for part in lease.parts]
    for part, error in end_parts("release", parts).items():
        _log.warning("task %r: a part of a batch is requeued later: %s", part.task, error)
    leases.clear()  # the heartbeat releases leases that are dropped
