"""What a take returns: groups that belong to this consumer until they are acknowledged."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import torch

from redrb.checks import checked_int
from redrb.codec import GroupLayout, decode_batch, decode_items, misfits
from redrb.errors import ConfigError, LeaseLost, RecordError
from redrb.experience import BufferItem, Experience, Status
from redrb.experience.records import Scalar, Side
from redrb.stream.arguments import BEFORE_ANY, checked_ids
from redrb.stream.take.scripts import Outcome


class Holder(Protocol):
    """What holds a lease in Redis: one slot of a consumer."""

    def finish(
        self, outcome: Outcome, ids: Sequence[int], *, reason: str, samples: int, ends: bool
    ) -> bool:
        """End leased groups; False when they are another consumer's by now.

        Args:
            outcome: How.
            ids: Which.
            reason: Why, for the dead-letter stream.
            samples: Samples in them.
            ends: Whether nothing of the lease is left then.
        """

    def abandon(self, ids: tuple[int, ...]) -> None:
        """Note that nobody can end these groups any more; it must not block."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """How groups were drawn: the weight of each, and that of all that waited."""

    weights: tuple[float, ...]
    total: float


@dataclass(frozen=True, slots=True)
class Expiry:
    """By what a group expired; None: that rule was not given.

    Attributes:
        current_version: Weight version at that time.
        max_staleness: Rule for a group's oldest version.
        max_token_staleness: Rule for the newest token.
    """

    current_version: int
    max_staleness: int | None
    max_token_staleness: int | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return what Redis keeps as three words."""
        version, *rules = text.split()
        whole, token = (None if rule == "-" else int(rule) for rule in rules)
        return cls(int(version), whole, token)


class Lease:
    """Groups taken from a task, held by this consumer's heartbeat until they are ended.

    As a context manager it acknowledges at the end of the block; an exception gives the groups
    back and counts as a failed delivery, an interrupt (Ctrl-C, SystemExit) gives them back
    unharmed. When groups do not fit into one batch, those that differ from most go to the
    dead-letter stream and the others go back unharmed.

    Attributes:
        ids: Ids of the groups that are still leased, in the order of the batch.
        expiries: Of groups taken with status EXPIRED, by what they expired; None for those that
            were put as expired.
    """

    def __init__(
        self,
        task: str,
        entries: Sequence[tuple[int, GroupLayout]],
        holder: Holder,
        drawn: Drawn | None = None,
    ) -> None:
        self._task = task
        self._layouts = dict(entries)
        self._holder = holder
        self._places = {seq: place for place, seq in enumerate(self._layouts)}
        self._drawn = drawn
        self.expiries: dict[int, Expiry | None] = {}
        # a lease that nobody ended and nobody holds any more goes back by itself
        self._finalizer = weakref.finalize(self, holder.abandon, tuple(self._layouts))
        self._finalizer.atexit = False

    def __len__(self) -> int:
        """Return the number of groups that are still leased."""
        return len(self._layouts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._layouts:
            return
        if error is None:
            self.ack()
            return
        with suppress(LeaseLost):  # what went wrong in the block matters more
            if isinstance(error, RecordError) and error.ids:  # the others did nothing wrong
                odd = [seq for seq in error.ids if seq in self._layouts]
                self._end("reject", odd, f"does not fit into a batch: {error}")
                self._end("release", None)
                return
            self._end("fail" if isinstance(error, Exception) else "release", None)

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of the groups that are still leased."""
        return tuple(self._layouts)

    @property
    def layouts(self) -> dict[int, GroupLayout]:
        """The groups that are still leased, checked and not decoded yet, by id."""
        return dict(self._layouts)

    @property
    def samples(self) -> int:
        """Samples in the groups that are still leased."""
        return sum(layout.samples for layout in self._layouts.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the groups that are still leased, as stored."""
        return sum(layout.nbytes for layout in self._layouts.values())

    @property
    def policy_versions(self) -> list[int | None]:
        """Policy version of each sample, without decoding tensors."""
        layouts = self._layouts.values()
        return [version for layout in layouts for version in layout.policy_versions]

    @property
    def group_ids(self) -> list[str | None]:
        """`group_id` of each group, in the order of `ids`, without decoding tensors."""
        return [layout.group_id for layout in self._layouts.values()]

    @property
    def statuses(self) -> list[Status]:
        """Status of each sample, as its maker set it, without decoding tensors.

        The group waited in the status that was taken, which `put(status=)` or `move` may have said.
        """
        return [status for layout in self._layouts.values() for status in layout.statuses]

    @property
    def tags(self) -> list[dict[str, Scalar]]:
        """Tags of each sample, without decoding tensors.

        Those of `put(tags=)` are not among them: they are in the task's index, for queries.
        """
        return [dict(tags) for layout in self._layouts.values() for tags in layout.tags]

    @property
    def probabilities(self) -> list[float]:
        """Probability of each group to be drawn next, when it was; of an order that draws.

        Raises:
            ConfigError: The task's order does not draw.
        """
        if self._drawn is None:
            raise ConfigError('only the orders "uniform" and "prioritized" draw by probabilities.')
        weights, total = self._drawn.weights, max(self._drawn.total, sum(self._drawn.weights))
        return [weights[self._places[seq]] / total if total else 0.0 for seq in self.ids]

    def importance_weights(self, beta: float = 0.4) -> torch.Tensor:
        """Return importance-sampling weights, one a sample of the batch, float32 `[B]`.

        `(N * P(i)) ** -beta`, divided by the largest of the batch (Schaul et al. 2016,
        arXiv:1511.05952, section 3.4); N cancels.
        """
        own = torch.tensor(self.probabilities, dtype=torch.float64).clamp_min(1e-300) ** -beta
        counts = torch.tensor([layout.samples for layout in self._layouts.values()])
        return (own / own.max()).repeat_interleave(counts).to(torch.float32)

    def staleness(self, current_version: int) -> list[int | None]:
        """Return how many versions each sample is behind; None where it has no version."""
        current = checked_int("current_version", current_version, BEFORE_ANY)
        return [
            None if version is None else max(0, current - version)
            for version in self.policy_versions
        ]

    def batch(
        self, device: str | torch.device = "cpu", *, side: Side = "left", pin_memory: bool = False
    ) -> Experience:
        """Return all samples as one zero-padded batch.

        Each sample is decoded straight into the padded tensors: one copy.

        Args:
            device: Where the batch is needed.
            side: Where padding goes.
            pin_memory: Decode into pinned memory, for a copy to `device` beside other work.

        Raises:
            RecordError: Samples differ in fields, ranks or dtypes, so there is no batch of them:
                `error.ids` are the groups that differ from most. Reject these, or read all one by
                one with `groups()`.
            LeaseLost: The lease was ended already.
        """
        self._check_held()
        layouts = list(self._layouts.values())
        on_accelerator = torch.device(device).type != "cpu"
        try:
            batch = decode_batch(layouts, side=side, pin=pin_memory and on_accelerator)
        except RecordError as error:
            ids = self.ids
            error.ids = tuple(ids[index] for index in misfits(layouts))
            raise
        return batch.to_device(device) if on_accelerator else batch

    def groups(self) -> list[list[BufferItem]]:
        """Return the samples of each group, in the order of `ids`."""
        self._check_held()
        return [decode_items(layout) for layout in self._layouts.values()]

    def items(self) -> list[BufferItem]:
        """Return all samples, group after group."""
        return [item for group in self.groups() for item in group]

    def ack(self, ids: Collection[int] | None = None) -> None:
        """Say that the groups are trained: they are deleted, once all consumer groups said so.

        Call it after the optimizer step. Safe to repeat when the connection breaks.

        Args:
            ids: Some of `self.ids`; default: all.

        Raises:
            LeaseLost: Another consumer has them by now; nothing was acknowledged.
        """
        self._end("ack", ids)

    def expire(self, ids: Collection[int] | None = None) -> None:
        """Say that the groups are too stale to be used: done, and counted as expired."""
        self._end("expire", ids)

    def release(self, ids: Collection[int] | None = None) -> None:
        """Give groups back unharmed: they wait again, in their old place, for any consumer."""
        self._end("release", ids)

    def reject(self, reason: str, ids: Collection[int] | None = None) -> None:
        """Move groups to the dead-letter stream, with the reason.

        Raises:
            LeaseLost: Another consumer has them by now.
        """
        if not isinstance(reason, str):
            raise ConfigError(f"reject({reason!r:.80}): say why in a str, and give ids after it.")
        self._end("reject", ids, reason)

    def abandon(self) -> None:
        """Leave what is still leased to this consumer's thread, which releases it; never blocks."""
        if self._layouts:
            self._layouts = {}
            self._finalizer()

    @property
    def holder(self) -> Holder:
        """What holds this lease in Redis."""
        return self._holder

    def conclude(self, *, held: bool) -> None:
        """Note that all of the lease was ended by another call than this object's own.

        Raises:
            LeaseLost: It was not, since another consumer has it by now.
        """
        ids = self.ids
        self._forget(ids)
        if not held:
            raise self._lost(ids)

    def _end(self, outcome: Outcome, ids: Collection[int] | None, reason: str = "") -> None:
        self._check_held()
        chosen = self.ids if ids is None else tuple(dict.fromkeys(checked_ids(ids)))
        unknown = [seq for seq in chosen if seq not in self._layouts]
        if unknown:
            raise ConfigError(f"groups {unknown} are not in this lease; it holds {self.ids}.")
        samples = sum(self._layouts[seq].samples for seq in chosen)
        ends = len(chosen) == len(self._layouts)
        held = self._holder.finish(outcome, chosen, reason=reason, samples=samples, ends=ends)
        self._forget(chosen if held else self.ids)
        if not held:
            raise self._lost(chosen)

    def _lost(self, ids: tuple[int, ...]) -> LeaseLost:
        return LeaseLost(
            task=self._task,
            ids=ids,
            why="this consumer's heartbeat stopped for longer than lease_ms, and others took "
            "over. Drop what came of it and take again.",
        )

    def _forget(self, ids: Collection[int]) -> None:
        for seq in ids:
            del self._layouts[seq]
        if not self._layouts:
            self._finalizer.detach()

    def _check_held(self) -> None:
        if not self._layouts:
            raise LeaseLost(task=self._task, ids=(), why="it was ended already.")
