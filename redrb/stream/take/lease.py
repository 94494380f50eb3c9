"""`Lease`: the groups that a take returns, held by this consumer until they are ended."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

import torch

from redrb.checks import checked_int
from redrb.codec import GroupLayout, decode_batch, decode_items, misfits
from redrb.connection.deadline import Deadline
from redrb.errors import ConfigError, LeaseLost, RecordError, StoreError, StoreUnavailable
from redrb.experience import BufferItem, Experience, Status
from redrb.experience.records import Scalar, Side
from redrb.scopes import Entered
from redrb.stream.arguments import BEFORE_ANY, AnyStatus, checked_ids, checked_tensors
from redrb.stream.take.calls import Outcome
from redrb.stream.take.cause import NO_CAUSE, Cause
from redrb.stream.take.forwarding import (
    ForwardedGroups,
    ForwardOptions,
    Target,
    chosen_groups,
    store_in_turn,
)
from redrb.stream.take.part import Chosen, Errors, Expiry, LeasePart, end_parts, raise_alone

Ids = TypeVar("Ids")


class PartsLease(Entered, Generic[Ids]):
    """Groups held in one part or several, used as one batch; `Ids` names some of the groups.

    All parts are ended together. When another consumer has taken one of them over, the others are
    ended all the same, and `LeaseLost` names it: all parts were trained in the same step. When a
    server is away, the parts on other servers are ended, `StoreUnavailable` names the missing ones,
    and the same call goes on with these. The heartbeat requeues a lease that nobody has any more.
    """

    def __init__(self, parts: Sequence[LeasePart]) -> None:
        self._parts = tuple(parts)
        self._misfits: Chosen = []
        self._lost: dict[str, LeaseLost] = {}
        self._unfit_rollouts: RecordError | None = None

    def __len__(self) -> int:
        """Return the number of groups that are still leased."""
        return sum(map(len, self._parts))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self:
            return
        if error is None:
            self.ack()
            return
        with suppress(LeaseLost):  # the error of the block matters more
            if isinstance(error, RecordError) and error is self._unfit_rollouts:
                self._end("release", None)
                return
            if isinstance(error, RecordError) and error.ids and self._misfits:
                self._reject_misfits(Cause.of(error, "does not fit into a batch: "))
                self._end("release", None)
                return
            if isinstance(error, Exception):
                self._end("fail", None, Cause.of(error))
            else:
                self._end("release", None)

    @property
    def samples(self) -> int:
        """Samples in the groups that are still leased."""
        return sum(part.samples for part in self._parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the groups that are still leased, as stored."""
        return sum(layout.nbytes for layout in self._layouts())

    @property
    def policy_versions(self) -> list[int | None]:
        """Policy version of each sample, without decoding tensors."""
        return [version for layout in self._layouts() for version in layout.policy_versions]

    @property
    def group_ids(self) -> list[str | None]:
        """`group_id` of each group, in the order of the batch, without decoding tensors."""
        return [layout.group_id for layout in self._layouts()]

    @property
    def statuses(self) -> list[Status]:
        """Status of each sample as its maker set it, without decoding tensors.

        The group may have waited in another status, set by `put(status=)` or `move`.
        """
        return [status for layout in self._layouts() for status in layout.statuses]

    @property
    def tags(self) -> list[dict[str, Scalar]]:
        """Tags of each sample, without decoding tensors.

        Values given as `put(tags=)` are not among them: they are in the task's index, for queries.
        """
        return [dict(tags) for layout in self._layouts() for tags in layout.tags]

    def staleness(self, current_version: int) -> list[int | None]:
        """Return how many versions each sample is behind; None where it has no version."""
        current = checked_int("current_version", current_version, BEFORE_ANY)
        return [
            None if version is None else max(0, current - version)
            for version in self.policy_versions
        ]

    def batch(
        self,
        device: str | torch.device = "cpu",
        *,
        side: Side = "left",
        pin_memory: bool = False,
        tensors: Collection[str] | None = None,
    ) -> Experience:
        """Return all samples as one zero-padded batch, decoded straight into the padded tensors.

        Args:
            device: Device of the batch.
            side: Where padding goes.
            pin_memory: Decode into pinned memory, for a copy to `device` beside other work.
            tensors: Names of the tensors that are wanted, standard fields and further ones; None:
                all. They come with their masks and lengths. Others are neither decoded nor copied,
                and groups may differ in them.

        Raises:
            ConfigError: No group has a tensor of this name: a step that names it needs it.
            RecordError: Samples differ in fields, ranks or dtypes, so there is no batch of them:
                `error.ids` are the groups that differ from most. Reject these, or read all one by
                one with `groups()`.
            LeaseLost: The lease was ended already.
        """
        self._check_held()
        names = checked_tensors(tensors)
        on_accelerator = torch.device(device).type != "cpu"
        try:
            pin = pin_memory and on_accelerator
            batch = decode_batch(self._layouts(), side=side, pin=pin, names=names)
            self._misfits = []
        except RecordError as error:
            self._name_misfits(error, names)
            raise
        return batch.to_device(device) if on_accelerator else batch

    def groups(self) -> list[list[BufferItem]]:
        """Return the samples of each group, in the order of the batch."""
        self._check_held()
        return [decode_items(layout) for layout in self._layouts()]

    def items(self) -> list[BufferItem]:
        """Return all samples, group after group."""
        return [item for group in self.groups() for item in group]

    def ack(self, ids: Ids | None = None) -> None:
        """Acknowledge groups as trained: each is deleted once all consumer groups have done so.

        Call it after the optimizer step. Safe to repeat when the connection breaks.

        Args:
            ids: Some of `self.ids`; default: all.

        Raises:
            LeaseLost: Another consumer has taken groups over; they were not acknowledged, all
                others were.
            StoreUnavailable: The groups on a server that is away are still leased; all others were
                acknowledged. The same call goes on with those that are left.
        """
        self._end("ack", ids)

    def expire(self, ids: Ids | None = None) -> None:
        """End groups as too stale to be used: they are done, and counted as expired."""
        self._end("expire", ids)

    def release(self, ids: Ids | None = None) -> None:
        """Requeue groups unharmed: they wait again, in their old place, for any consumer."""
        self._end("release", ids)

    def reject(self, reason: str | BaseException, ids: Ids | None = None) -> None:
        """Move groups to the dead-letter stream of their task.

        Args:
            reason: Why, as a text; or an exception, whose class and message are recorded.
            ids: Some of `self.ids`; default: all.

        Raises:
            LeaseLost: Another consumer has taken them over.
        """
        self._end("reject", ids, _cause("reject", reason))

    def fail(self, reason: str | BaseException, ids: Ids | None = None) -> None:
        """Requeue groups, and count a failed delivery of each.

        After `max_deliveries` of the task a group goes to the dead letters, with the last reason.

        Args:
            reason: Why, as a text; or an exception, whose class and message are recorded.
            ids: Some of `self.ids`; default: all.
        """
        self._end("fail", ids, _cause("fail", reason))

    def abandon(self) -> None:
        """Let the heartbeat thread release the groups that are still leased; never blocks."""
        for part in self._parts:
            part.abandon()

    @abstractmethod
    def _select(self, ids: Ids) -> Chosen:
        """Find groups in the parts; raises ConfigError for groups that are not in this lease."""

    def _layouts(self) -> list[GroupLayout]:
        return [layout for part in self._parts for layout in part.layouts.values()]

    def _end(self, outcome: Outcome, ids: Ids | None, reason: Cause = NO_CAUSE) -> None:
        self._check_held()
        if ids is None:
            chosen = [(part, part.ids) for part in self._parts if part]
        else:
            chosen = self._select(ids)
        self._end_parts(outcome, chosen, reason)

    def _end_parts(self, outcome: Outcome, chosen: Chosen, reason: Cause) -> None:
        """End groups of all parts, then raise the error of those that were not ended."""
        raise_alone(self._error(end_parts(outcome, chosen, reason)))

    def _error(self, errors: Errors) -> LeaseLost | StoreError | None:
        unfinished: dict[LeasePart, StoreError] = {}
        for part, error in errors.items():
            if isinstance(error, LeaseLost):
                before = self._lost.get(part.task)
                ids = (*(before.ids if before else ()), *error.ids)
                self._lost[part.task] = LeaseLost(task=part.task, ids=ids, why=error.why)
            else:
                unfinished[part] = error
        if unfinished:  # a loss is raised by the call that goes on after the outage
            return self._unfinished(unfinished)
        lost, self._lost = list(self._lost.values()), {}
        for further in lost[1:]:
            lost[0].add_note(str(further))
        return lost[0] if lost else None

    def _unfinished(self, errors: Mapping[LeasePart, StoreError]) -> StoreError:
        """Return the error of parts that could not be ended, and are still leased."""
        error, *others = errors.values()
        if isinstance(error, StoreUnavailable) and len(self._parts) > 1:
            names = ", ".join(f"task {part.task!r}" for part in errors)
            error = StoreUnavailable(
                f"groups of {names} were not ended, and are still leased; all others were ended. "
                f"Repeat the call: it goes on with these. {error}",
                where=error.where,
                uncertain=error.uncertain,
            )
        for other in (*others, *self._lost.values()):
            error.add_note(str(other))
        return error

    def _name_misfits(self, error: RecordError, names: Collection[str] | None) -> None:
        """Note which groups fit into no batch, here and in the error."""
        places = [(part, seq) for part in self._parts for seq in part.layouts]
        found = [places[index] for index in misfits(self._layouts(), names)]
        self._misfits = [
            (part, ids)
            for part in self._parts
            if (ids := tuple(seq for other, seq in found if other is part))
        ]
        misfitting = tuple(seq for _, ids in self._misfits for seq in ids)
        if any(part.rollouts for part in self._parts):  # they may fit with another reader
            self._misfits, self._unfit_rollouts = [], error
            error.add_note(
                f"Groups {list(misfitting)} differ from the others. They stay where they are, as "
                "rollouts of a ReplayBuffer are in the batch: give the stream a reader that gives "
                "all samples the same fields, or reject these groups."
            )
            return
        error.ids = misfitting

    def _reject_misfits(self, reason: Cause) -> None:
        still = [
            (part, tuple(seq for seq in ids if seq in part.layouts)) for part, ids in self._misfits
        ]
        with suppress(LeaseLost):  # the other groups are released all the same
            self._end_parts("reject", [(part, ids) for part, ids in still if ids], reason)

    def __repr__(self) -> str:
        return f"<redrb.{type(self).__name__} {len(self)} groups of {self._tasks}>"

    @property
    def _tasks(self) -> str:
        return ", ".join(dict.fromkeys(part.task for part in self._parts))

    def _check_held(self) -> None:
        if not self:
            raise LeaseLost(task=self._tasks, ids=(), why="it was ended already.")


class Lease(PartsLease[Collection[int]]):
    """Groups taken from a task, held by this consumer's heartbeat until they are ended.

    As a context manager it acknowledges at the end of the block; an exception requeues the groups
    and counts as a failed delivery, an interrupt (Ctrl-C, SystemExit) requeues them unharmed. When
    groups do not fit into one batch, the ones that differ from most go to the dead-letter stream
    and the others are requeued unharmed.
    """

    @property
    def parts(self) -> tuple[LeasePart, ...]:
        """The parts of the lease, each with its holder in Redis."""
        return self._parts

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of the groups that are still leased, in the order of the batch."""
        return tuple(seq for part in self._parts for seq in part.layouts)

    @property
    def incarnation(self) -> str:
        """Incarnation of the task in which the groups were leased; `settle` asks for it."""
        return self._parts[0].incarnation

    @property
    def unacknowledged(self) -> dict[int, int]:
        """Samples of each group that `ack` will acknowledge, by id.

        A checkpoint that is written before `ack` keeps them for `settle`. The lease of rank 0 names
        the groups of all ranks, and those of other ranks name none.
        """
        return {seq: layout.samples for seq, layout in self.layouts.items()}

    @property
    def layouts(self) -> dict[int, GroupLayout]:
        """The groups that are still leased, checked and not decoded yet, by id."""
        return dict(zip(self.ids, self._layouts(), strict=True))

    @property
    def expiries(self) -> dict[int, Expiry | None]:
        """Why groups that were taken with status EXPIRED expired; None if put as expired."""
        return {seq: expiry for part in self._parts for seq, expiry in part.expiries.items()}

    @property
    def probabilities(self) -> list[float]:
        """Probability with which each group was the first to be drawn, for orders that draw.

        Raises:
            ConfigError: The task's order does not draw.
        """
        weights, total = self._draw()
        return [weight / total if total else 0.0 for weight in weights]

    def importance_weights(self, beta: float = 0.4) -> torch.Tensor:
        """Return importance-sampling weights, one a sample of the batch, float32 `[B]`.

        `(N * P(i)) ** -beta`, divided by the largest of the batch (Schaul et al. 2016,
        arXiv:1511.05952, section 3.4); N and the sum of all weights cancel. A group of priority 0
        is drawn when nothing else is left, with no probability of its own: its weight is the
        largest.

        Raises:
            ConfigError: The task's order does not draw.
            LeaseLost: The lease has ended.
        """
        self._check_held()
        drawn = torch.tensor(self._draw()[0], dtype=torch.float64)
        drawn[drawn <= 0] = drawn[drawn > 0].min() if bool((drawn > 0).any()) else 1.0
        weights = (drawn / drawn.min()) ** -beta
        counts = torch.tensor([layout.samples for layout in self._layouts()])
        return weights.repeat_interleave(counts).to(torch.float32)

    def _draw(self) -> tuple[list[float], float]:
        """Return the weight of each group, and the sum of all that waited."""
        draws = [part.draw for part in self._parts if part.draw is not None]
        if len(draws) < len(self._parts):
            raise ConfigError('only the orders "uniform" and "prioritized" draw by probabilities.')
        total = sum(max(draw.total, sum(draw.weights.values())) for draw in draws)
        weights = [
            draw.weights[seq]
            for part, draw in zip(self._parts, draws, strict=True)
            for seq in part.layouts
        ]
        return weights, total

    def forward(
        self,
        stream: Target,
        groups: ForwardedGroups,
        *,
        priority: float | None = None,
        status: AnyStatus | None = None,
        tags: Mapping[str, Scalar | None] | None = None,
        timeout: float | None = None,
    ) -> tuple[int | None, ...]:
        """Move groups to the next task with added fields, each exactly once.

        The groups are put into `stream`, then acknowledged here. A process that dies in between
        leaves them leased; whoever takes them next forwards them again, and the put recognizes
        them. The tasks may be on different nodes or servers. See docs/how-to/stages.md.

        Args:
            stream: The `ExperienceStream` of the next task.
            groups: The samples of each leased group, in the order of the lease, and None for groups
                to filter; or a dict of these by id: other groups stay leased; or `lease.batch()`
                with added fields, all samples as one Experience.
            priority, status, tags, timeout: Of the put, as in `ExperienceStream.put`. Tags and
                priorities that were given to the put into this task are not known here.

        Returns:
            The id of each group in `stream`, in the order of `groups`; None for filtered ones, and
            for those that were stored before `stream` was resumed from a file.

        Raises:
            LeaseLost: Another consumer has taken groups over. It forwards those that this call has
                not stored; nothing is to be repeated.
            As `ExperienceStream.put`: the groups are still leased, and the call may be repeated.
        """
        self._check_held()
        if not hasattr(stream, "store_forwarded"):
            raise ConfigError(f"stream={stream!r:.80}: give the ExperienceStream of the next task.")
        options = ForwardOptions(priority=priority, status=status, tags=tags)
        chosen = chosen_groups(groups, self.ids, [each.samples for each in self._layouts()])
        parts = [(part, {seq: seq for seq in part.layouts}, stream) for part in self._parts]
        with Deadline(timeout):
            ids, stored = store_in_turn(parts, chosen, options)
        self._end_parts("ack", stored, NO_CAUSE)
        return tuple(ids[name] for name in chosen)

    def _select(self, ids: Collection[int]) -> Chosen:
        return select(self._parts, ids)


def _cause(method: str, reason: object) -> Cause:
    if not isinstance(reason, str | BaseException):
        raise ConfigError(
            f"{method}({reason!r:.80}): give a reason as a str or an exception, then the ids."
        )
    return Cause.of(reason)


def select(parts: Sequence[LeasePart], ids: Collection[int]) -> Chosen:
    """Find groups of one task, by id, in the parts of a lease; raises ConfigError for others."""
    wanted = dict.fromkeys(checked_ids(ids))
    every = [seq for part in parts for seq in part.layouts]
    unknown = sorted(wanted.keys() - {*every})
    if unknown:
        raise ConfigError(f"groups {unknown} are not in this lease; it holds {every}.")
    chosen = [(part, tuple(seq for seq in wanted if seq in part.layouts)) for part in parts]
    return [(part, found) for part, found in chosen if found]
