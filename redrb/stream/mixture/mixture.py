"""`Mixture`: batches from several tasks, in ratios that hold exactly."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from numbers import Rational, Real

from redrb.checks import checked_int
from redrb.connection import Client
from redrb.connection.deadline import GRACE_S, SHORT_OUTAGE_S, Deadline, here
from redrb.errors import BatchTimeout, ConfigError, StoreUnavailable
from redrb.forks import in_child
from redrb.keys import check_name
from redrb.scopes import Closing
from redrb.stream import ExperienceStream, Lease
from redrb.stream.mixture.lease import MixtureLease
from redrb.stream.options import LEASE_MS
from redrb.stream.take.part import end_parts
from redrb.stream.take.rollout_reading import GroupReader
from redrb.words import counted


class Split:
    """The groups that one mixture has taken of each task, and the shares of its next take.

    Group number k of a task is due when its weight times all groups reaches k, and may be taken as
    soon as that passes k - 1. Always taking the group that is due first never misses a due moment
    (the quota method of Balinski and Young, 1975), so each task stays within one group of its
    quota, for any takes. Largest remainders do not: they may give a group that a later take would
    have to take back.
    """

    def __init__(self, ratio: Ratio) -> None:
        self._parts = ratio.parts
        self._whole = sum(ratio.parts.values())
        self.taken = dict.fromkeys(ratio.parts, 0)

    def shares(self, count: int) -> dict[str, int]:
        """Return the groups to take of each task; they add up to `count`."""
        total = sum(self.taken.values()) + count
        behind = {  # groups, times `whole`; they add up to those of the take
            task: part * total - self._whole * self.taken[task]
            for task, part in self._parts.items()
        }
        shares = {task: max(0, credit // self._whole) for task, credit in behind.items()}
        for _ in range(count - sum(shares.values())):
            left = {task: behind[task] - shares[task] * self._whole for task in shares}
            due = {
                task: Fraction(self._whole - left[task], self._parts[task])
                for task in left
                if left[task] > 0
            }
            shares[min(due, key=due.__getitem__)] += 1
        return shares

    def keep(self, shares: dict[str, int]) -> None:
        """Count the groups of a take."""
        self.taken = {task: self.taken[task] + share for task, share in shares.items()}


@dataclass(frozen=True, slots=True)
class Ratio:
    """Each task's share of a mixture.

    Attributes:
        parts: Task -> whole number, sorted by name; its share is this number over the sum of all.
    """

    parts: dict[str, int]

    @classmethod
    def of(cls, weights: Mapping[str, float]) -> Ratio:
        """Return the ratio of weights, exactly as written: 0.7 is 7/10; raises ConfigError."""
        if not isinstance(weights, Mapping) or not weights:
            raise ConfigError(
                f'a mixture of {weights!r}: give a weight a task, such as {{"math": 0.7, "code": '
                "0.3}."
            )
        exact = {check_name("task", task): _fraction(task, weights[task]) for task in weights}
        whole = sum(exact.values())
        shares = {task: exact[task] / whole for task in sorted(exact)}
        denominator = math.lcm(*(share.denominator for share in shares.values()))
        return cls({task: int(share * denominator) for task, share in shares.items()})

    @property
    def weights(self) -> dict[str, float]:
        """Each task's share of the whole; they add up to 1."""
        whole = sum(self.parts.values())
        return {task: part / whole for task, part in self.parts.items()}

    def __str__(self) -> str:
        return ", ".join(f"{task} {weight:.4g}" for task, weight in self.weights.items())


def _fraction(task: str, weight: object) -> Fraction:
    """Return a weight as it was written: 0.7 is 7/10."""
    exact, is_bool = Fraction(0), isinstance(weight, bool)
    if isinstance(weight, Rational) and not is_bool:
        exact = Fraction(int(weight.numerator), int(weight.denominator))
    elif isinstance(weight, Real) and not is_bool and math.isfinite(float(weight)):
        exact = Fraction(repr(float(weight)))
    if exact > 0:
        return exact
    raise ConfigError(
        f"the weight of task {task!r} is {weight!r}: it must be a positive finite number. "
        "Leave out a task that is not to be taken from."
    )


_log = logging.getLogger("redrb")


class Mixture(Closing):
    """Several tasks from which one batch is taken, in given ratios.

    After every take of this object the number of groups that it has taken of each task differs from
    the task's weight times all groups that it has taken by less than one. A take that fails does
    not count. Each trainer keeps the ratios for itself, so n trainers together are off by less than
    n groups of a task.

    One object may be shared by threads: their takes run one after the other, and while one waits
    for a task that starves, the others wait behind it. A forked process counts anew.

    Examples:
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
        self._begin()
        in_child(self._begin)

    def _begin(self) -> None:
        """Count from 0; in a forked process no thread is left that could end its turn."""
        self._turn = threading.Lock()
        self._split = Split(self._ratio)
        self._waits_for: tuple[str, int] | None = None  # task, and groups of it

    def __repr__(self) -> str:
        return f"<redrb.Mixture {self.namespace}: {self._ratio}>"

    @property
    def weights(self) -> dict[str, float]:
        """Task -> its share; they add up to 1."""
        return self._ratio.weights

    def take(
        self, count: int, *, timeout: float | None = None, ack: MixtureLease | None = None
    ) -> MixtureLease:
        """Lease exactly `count` groups of all tasks together, or none.

        Args:
            count: Groups in the batch, at least 1.
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
        count = checked_int("count", count, 1)
        with Deadline(timeout), ExitStack() as scope:
            for stream in self._streams.values():
                scope.enter_context(stream.worker.steps.fetching())
            if ack:
                ack.ack()
            scope.enter_context(self._its_turn(count))
            shares = self._split.shares(count)
            leases = self._take_shares(shares)
            self._split.keep(shares)
        return MixtureLease([part for lease in leases.values() for part in lease.parts])

    def taken(self) -> dict[str, int]:
        """Return how many groups the takes of this object have taken of each task.

        Groups that came back from a lease and were taken again count again.
        """
        return dict(self._split.taken)

    def close(self) -> None:
        """Stop the heartbeats and requeue the groups still leased. The client stays open."""
        close_all(self._client, self._streams.values())

    @contextmanager
    def _its_turn(self, count: int) -> Iterator[None]:
        """Wait until no other thread takes; a take that waits for no task is over soon."""
        deadline = here()
        while not self._turn.acquire(timeout=deadline.slice_s()):
            starving = self._waits_for
            if starving is None and self._turn.acquire(timeout=min(SHORT_OUTAGE_S, here().left_s)):
                break
            if deadline.over:
                raise self._behind(starving, count)
            if starving is not None:
                deadline.log(
                    f"mixture {self._ratio}, consumer group {self.group!r}: the take before this "
                    f"one waits for task {starving[0]!r}"
                )
        try:
            yield
        finally:
            self._turn.release()

    def _take_shares(self, shares: Mapping[str, int]) -> dict[str, Lease]:
        """Lease the share of each task, or nothing; always in the same order of tasks."""
        leases: dict[str, Lease] = {}
        try:
            # so two trainers with tasks in common never wait for groups that the other one holds
            for task, share in shares.items():
                if share:
                    leases[task] = self._take_share(task, share)
        except BatchTimeout as error:
            counts = {error.task: (error.available, error.wanted)}
            for task, share in shares.items():
                if share and task not in leases and task not in counts:
                    available = self._streams[task].count()
                    if available < share:
                        counts[task] = (available, share)
            note = f"To take {sum(shares.values())} groups from the mixture {self._ratio}."
            raise self._timeout(counts, note, error) from error
        finally:
            if len(leases) < sum(share > 0 for share in shares.values()):
                release(leases.values())
        return leases

    def _take_share(self, task: str, share: int) -> Lease:
        stream = self._streams[task]
        try:
            return stream.take(share, timeout=0)
        except (BatchTimeout, StoreUnavailable):
            if here().over:
                raise
        self._waits_for = (task, share)
        try:
            return stream.take(share)
        finally:
            self._waits_for = None

    def _behind(self, starving: tuple[str, int] | None, count: int) -> BatchTimeout:
        """Return the error of a take while another thread's take had not ended in time."""
        needed = self._split.shares(count) if starving is None else dict([starving])
        counts = {task: (self._streams[task].count(), share) for task, share in needed.items()}
        note = (
            f"An earlier take from the mixture {self._ratio} has not ended: it needs these groups."
        )
        return self._timeout(counts, note)

    def _timeout(
        self,
        counts: Mapping[str, tuple[int, int]],
        note: str,
        first: BatchTimeout | None = None,
    ) -> BatchTimeout:
        """Return the error that names the tasks that had too few of the groups needed."""
        alone = first if len(counts) == 1 else None
        error = BatchTimeout(
            task=", ".join(counts),
            namespace=self.namespace,
            wanted=sum(needed for _, needed in counts.values()),
            available=sum(available for available, _ in counts.values()),
            waited_s=here().waited_s,
            blocked=first.blocked if first else 0,
            expired=first.expired if first else 0,
            others=first.others if first else 0,
            fates=alone.fates if alone else {},
            similar=alone.similar if alone else (),
        )
        error.add_note(note)
        if len(counts) > 1:
            if first is not None:
                error.add_note(str(first))
            for task, (available, needed) in counts.items():
                groups = counted(needed, "group", "were")
                error.add_note(f"task {task!r}: {available} of {groups} waiting.")
        return error


def close_all(client: Client, streams: Iterable[ExperienceStream]) -> None:
    """Close streams; one that fails keeps no other open, and those that answer are closed first.

    Raises:
        StoreUnavailable: It names the tasks whose servers were away.
    """
    away: dict[ExperienceStream, StoreUnavailable] = {}

    def close(stream: ExperienceStream, limits: Callable[[], Deadline]) -> None:
        try:
            with limits():
                stream.close()
            away.pop(stream, None)
        except StoreUnavailable as error:
            away[stream] = error.with_traceback(None)  # it would hold this frame and `away`

    with ExitStack() as scope:
        for stream in streams:
            scope.callback(close, stream, partial(Deadline, at_most=GRACE_S, repeat_s=0.0))
    with Deadline(client.retry_s):
        for stream in reversed(tuple(away)):
            close(stream, Deadline)
    for error in away.values():
        names = ", ".join(repr(stream.task) for stream in reversed(away))
        message = f"not closed: tasks {names}. Close again when they are back. {error}"
        raise StoreUnavailable(message, where=client.where) from error


def release(leases: Iterable[Lease]) -> None:
    """Requeue the groups of a take that failed; the heartbeats do so of servers that are away."""
    parts = [(part, part.ids) for lease in leases for part in lease.parts]
    for part, error in end_parts("release", parts).items():
        _log.warning("task %r: a part of a batch is requeued later: %s", part.task, str(error))
        part.abandon()
