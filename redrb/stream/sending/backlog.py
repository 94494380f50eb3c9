"""The groups that an `ExperienceSender` holds: counted, bounded, and the errors of lost ones."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from redrb.connection.deadline import here
from redrb.errors import ConfigError, RecordError, SendFailed, StoreError
from redrb.experience import BufferItem, Experience
from redrb.experience.records import batch_size, named_tensors
from redrb.experience.rows import select_rows, with_tensors
from redrb.stream.put.preparer import GroupedRows, Items, as_list
from redrb.words import counted


@dataclass(frozen=True, slots=True)
class HeldItems:
    """The experience of one `send`.

    Attributes:
        groups: Groups in it, before filters.
        nbytes: Bytes of its tensors.
        copies: Events of copies from accelerators that may still be under way.
    """

    items: Experience | GroupedRows | list[BufferItem]
    groups: int
    nbytes: int
    copies: Sequence[torch.cuda.Event] = field(default=())

    @classmethod
    def of(cls, items: Items | GroupedRows) -> HeldItems:
        """Count groups and bytes; raises RecordError for other items, or fields of another type."""
        if isinstance(items, Experience):
            return cls(items, batch_size(items), _nbytes(items))
        if isinstance(items, GroupedRows):
            return cls(items, len(items.rows()), _nbytes(items.experience))
        samples = [items] if isinstance(items, BufferItem) else as_list(items, "samples")
        for item in samples:
            if not isinstance(item, BufferItem):
                raise RecordError(f"a group holds a {type(item).__name__}: give redrb.BufferItem.")
        return cls(list(samples), min(1, len(samples)), sum(map(_nbytes, samples)))

    def copied(self) -> HeldItems:
        """Return a copy on the CPU, which shares no tensor with the caller.

        From an accelerator of type "cuda" the copy is asynchronous: work that is queued later on
        the device's current stream may change the tensors. Extras are not copied.
        """
        offload = _Offload()
        items: Experience | GroupedRows | list[BufferItem]
        if isinstance(self.items, Experience):
            items = with_tensors(self.items, offload)
        elif isinstance(self.items, GroupedRows):
            items = GroupedRows(with_tensors(self.items.experience, offload))
        else:
            items = [with_tensors(item, offload) for item in self.items]
        return replace(self, items=items, copies=offload.events())

    def part(self, first: int, step: int) -> HeldItems:
        """Return every `step`-th group from `first` on; views of tensors where rows are groups."""
        if step == 1:
            return self
        groups = len(range(first, self.groups, step))
        if isinstance(self.items, list):
            return self if groups else replace(self, items=[], groups=0, nbytes=0)
        if isinstance(self.items, GroupedRows):
            chosen = [row for rows in self.items.rows()[first::step] for row in rows]
            experience = select_rows(self.items.experience, chosen, lambda tensor: tensor[chosen])
            return HeldItems(GroupedRows(experience), groups, _nbytes(experience), self.copies)
        every = range(first, self.groups, step)
        experience = select_rows(self.items, every, lambda tensor: tensor[first::step])
        return HeldItems(experience, groups, _nbytes(experience), self.copies)


class _Offload:
    """Copies tensors to the CPU."""

    def __init__(self) -> None:
        self._devices: set[torch.device] = set()

    def __call__(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            return tensor.clone()
        if tensor.device.type != "cuda":
            return tensor.cpu()
        self._devices.add(tensor.device)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def events(self) -> list[torch.cuda.Event]:
        """Return an event for each device, which occurs when its copies are made."""
        events = []
        for device in self._devices:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return events


def _nbytes(record: BufferItem | Experience) -> int:
    return sum(tensor.nbytes for tensor in named_tensors(record).values())


_log = logging.getLogger("redrb")


class Backlog:
    """Counts the groups on their way, and keeps errors for the next call; safe among threads.

    Attributes:
        changed: Notified at every change; its lock guards all attributes.
        closed: Whether nothing more is taken over.
        nbytes: Bytes of their tensors.
        unsent: Groups that were given up because the sender was closed.
    """

    def __init__(self, max_groups: int | None, max_bytes: int | None) -> None:
        self._max_groups, self._max_bytes = max_groups, max_bytes
        self.changed = threading.Condition()
        self.closed = False
        self.groups = self.nbytes = self.unsent = 0
        self._failures: list[tuple[Exception, int]] = []
        self._outages: dict[object, StoreError] = {}

    def reserve(self, held: HeldItems) -> None:
        """Count items in when there is room; there always is when nothing else is held.

        Raises:
            SendFailed: There was no room in time.
            ConfigError: The sender was closed.
        """
        deadline = here()
        with self.changed:
            while self.groups and not (
                (self._max_groups is None or self.groups + held.groups <= self._max_groups)
                and (self._max_bytes is None or self.nbytes + held.nbytes <= self._max_bytes)
            ):
                self.check_open()
                if deadline.over:
                    problem = f"left no room for more within {deadline.waited_s:.1f} s"
                    raise self.late(self.groups, problem)
                deadline.log(f"a sender is full with {counted(self.groups, 'group')}")
                self.changed.wait(deadline.slice_s())
            self._count(held.groups, held.nbytes)

    def cancel(self, held: HeldItems) -> None:
        """Count items out that were reserved, and that no stream sender gets."""
        with self.changed:
            self._count(-held.groups, -held.nbytes)

    def settle(self, held: HeldItems, unsent: int) -> None:
        """Count items out that were put, except `unsent` groups that were given up."""
        with self.changed:
            self.unsent += unsent
            self._count(-held.groups, -held.nbytes)

    def fail(self, error: Exception, dropped: int) -> None:
        """Keep an error, because of which groups were dropped, for the next call."""
        with self.changed:
            self._failures.append((error, dropped))
        what = f"drops {counted(dropped, 'group')}" if dropped else "cannot put"
        _log.error("a sender %s: %s", what, error)  # in case no call follows

    def note_outage(self, sender: object, error: StoreError | None) -> None:
        """Keep the error because of which a thread cannot put now; None: it can again."""
        if error is None:
            self._outages.pop(sender, None)
        else:
            self._outages[sender] = error

    def raise_failures(self) -> None:
        """Raise the errors since the last call as SendFailed, which counts the groups given up."""
        with self.changed:
            failures, self._failures = self._failures, []
        if failures:
            first, dropped = failures[0][0], sum(count for _, count in failures)
            more = f", and {counted(len(failures) - 1, 'more error')}" if len(failures) > 1 else ""
            raise SendFailed(
                f"given up, of those sent before: {counted(dropped, 'group')}: {first}{more}",
                dropped=dropped,
            ) from first

    def late(self, unsent: int, problem: str) -> SendFailed:
        """Return the error for groups that are not stored, with the reason if it is known."""
        outage = next(iter(list(self._outages.values())), None)
        behind = (
            "trainers may be behind, or Redis may be at its memory limit (`redrb doctor "
            "--namespace NAMESPACE` says which)"
        )
        why = behind if outage is None else str(outage)
        failure = SendFailed(f"{counted(unsent, 'group')} {problem}: {why}", unsent=unsent)
        failure.__cause__ = outage
        return failure

    def given_up(self, unsent: int) -> SendFailed:
        """Return the error for groups that are given up at the end, and for earlier failures."""
        failure = self.late(unsent, "not stored in time, and given up")
        failure.dropped = sum(count for _, count in self._failures)
        for error, _ in self._failures:
            failure.add_note(f"given up before: {error}")
        return failure

    def check_open(self) -> None:
        """Raise ConfigError after the sender was closed."""
        if self.closed:
            raise ConfigError("the sender is closed.")

    def _count(self, groups: int, nbytes: int) -> None:
        self.groups += groups
        self.nbytes += nbytes
        self.changed.notify_all()
