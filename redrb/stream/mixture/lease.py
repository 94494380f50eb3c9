"""What a take from several tasks returns: one lease a task, used as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

import torch

from redrb.codec import decode_batch, misfits
from redrb.errors import ConfigError, LeaseLost, RecordError
from redrb.experience import BufferItem, Experience
from redrb.experience.records import Side
from redrb.stream import Lease

Ids = Mapping[str, Collection[int]]


class MixtureLease:
    """Groups taken from several tasks, task after task, held until they are ended.

    It is used like a `Lease`; ids are those of the tasks, so they go by task. As a context manager
    it acknowledges at the end of the block; an exception gives the groups back and counts as a
    failed delivery, an interrupt (Ctrl-C, SystemExit) gives them back unharmed. When groups do not
    fit into one batch, those that differ from most go to the dead-letter stream of their task and
    the others go back unharmed.

    The tasks are ended one after the other. When another consumer has one of them by now, the
    others are ended all the same, and `LeaseLost` names it: it is the same optimizer step that was
    done with all of them. After `StoreUnavailable` the same call goes on with those that are left.

    Attributes:
        parts: Task -> its own lease, for tasks that gave a group.
    """

    def __init__(self, parts: Mapping[str, Lease]) -> None:
        self.parts = dict(parts)
        self._odd: dict[str, list[int]] = {}

    def __len__(self) -> int:
        """Return the number of groups that are still leased."""
        return sum(map(len, self.parts.values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self:
            return
        if error is None:
            self.ack()
            return
        if isinstance(error, RecordError):
            if error.ids and self._odd:  # the others did nothing wrong
                self._bury(f"does not fit into a batch: {error}")
                return
            error = RecordError(str(error))  # ids of one task would be other groups in another
        for part in self._held().values():
            part.__exit__(type(error), error, trace)

    @property
    def ids(self) -> dict[str, tuple[int, ...]]:
        """Task -> ids of its groups that are still leased, in the order of the batch."""
        return {task: part.ids for task, part in self._held().items()}

    @property
    def tasks(self) -> list[str]:
        """Task of each group that is still leased, in the order of `groups()`."""
        return [task for task, part in self._held().items() for _ in range(len(part))]

    @property
    def sample_tasks(self) -> list[str]:
        """Task of each sample that is still leased: of each row of `batch()`."""
        return [task for task, part in self._held().items() for _ in range(part.samples)]

    @property
    def samples(self) -> int:
        """Samples in the groups that are still leased."""
        return sum(part.samples for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the groups that are still leased, as stored."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def policy_versions(self) -> list[int | None]:
        """Policy version of each sample, without decoding tensors."""
        return [version for part in self.parts.values() for version in part.policy_versions]

    def batch(
        self, device: str | torch.device = "cpu", *, side: Side = "left", pin_memory: bool = False
    ) -> Experience:
        """Return all samples of all tasks as one zero-padded batch, a row each.

        Args and errors are those of `Lease.batch`. Rows go task by task: see `sample_tasks`. Of a
        RecordError, `error.ids` are of the task that its note names.
        """
        self._check_held()
        layouts = [
            (task, seq, own)
            for task, part in self.parts.items()
            for seq, own in part.layouts.items()
        ]
        on_accelerator = torch.device(device).type != "cpu"
        pin = pin_memory and on_accelerator
        try:
            batch = decode_batch([own for _, _, own in layouts], side=side, pin=pin)
        except RecordError as error:
            self._odd = {}
            for index in misfits([own for _, _, own in layouts]):
                task, seq, _ = layouts[index]
                self._odd.setdefault(task, []).append(seq)
            error.ids = tuple(seq for seqs in self._odd.values() for seq in seqs)
            for task, seqs in self._odd.items():
                error.add_note(f"of task {task!r}: groups {seqs}")
            raise
        return batch.to_device(device) if on_accelerator else batch

    def groups(self) -> list[list[BufferItem]]:
        """Return the samples of each group, in the order of `tasks`."""
        self._check_held()
        return [group for part in self._held().values() for group in part.groups()]

    def items(self) -> list[BufferItem]:
        """Return all samples, group after group."""
        return [item for group in self.groups() for item in group]

    def ack(self, ids: Ids | None = None) -> None:
        """Say that the groups are trained.

        Call it after the optimizer step. Safe to repeat when the connection breaks.

        Args:
            ids: Task -> some of its ids; default: all of all tasks.

        Raises:
            LeaseLost: Another consumer has those of a task by now; the others are acknowledged.
        """
        self._end(Lease.ack, ids)

    def release(self, ids: Ids | None = None) -> None:
        """Give groups back unharmed: they wait again, in their old places.

        They were taken, so they count in the mixture, and again when they are taken again.
        """
        self._end(Lease.release, ids)

    def reject(self, reason: str, ids: Ids | None = None) -> None:
        """Move groups to the dead-letter streams of their tasks, with the reason."""
        self._end(lambda part, own: part.reject(reason, own), ids)

    def _end(self, end: Callable[[Lease, Collection[int] | None], None], ids: Ids | None) -> None:
        """End groups of each task; tell of the lost ones when all are done."""
        self._check_held()
        chosen: Mapping[str, Collection[int] | None] = (
            dict.fromkeys(self._held()) if ids is None else ids
        )
        self._check_known(chosen)
        lost = []
        for task, own in chosen.items():
            try:
                end(self.parts[task], own)
            except LeaseLost as error:
                lost.append(error)
        if lost:
            for further in lost[1:]:
                lost[0].add_note(str(further))
            raise lost[0]

    def _bury(self, reason: str) -> None:
        """Reject what did not fit into the batch and release the others."""
        held = {task: set(part.ids) for task, part in self._held().items()}
        odd = {
            task: [seq for seq in seqs if seq in held[task]]
            for task, seqs in self._odd.items()
            if task in held
        }
        with suppress(LeaseLost):  # what went wrong in the block matters more
            self.reject(reason, {task: seqs for task, seqs in odd.items() if seqs})
        with suppress(LeaseLost):
            self.release()

    def _held(self) -> dict[str, Lease]:
        return {task: part for task, part in self.parts.items() if part}

    def _check_held(self) -> None:
        if not self:
            raise LeaseLost(task=", ".join(self.parts), ids=(), why="it was ended already.")

    def _check_known(self, chosen: Mapping[str, Collection[int] | None]) -> None:
        """Refuse ids that are not in this lease before any of it is ended."""
        held = self.ids
        for task, own in chosen.items():
            unknown = set(own or ()) - set(held.get(task, ()))
            if unknown or task not in held:
                raise ConfigError(
                    f"groups {sorted(unknown)} of task {task!r} are not in this lease; it holds "
                    f"{held}."
                )
