"""`SendJob`: the experience of one `send` for one stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from redrb.errors import RecordError, StoreError
from redrb.experience import BufferItem, Experience, split_experience_batch
from redrb.experience.records import batch_size, named_tensors, per_sample
from redrb.experience.rows import select_rows, with_tensors
from redrb.stream.admission import Admission
from redrb.stream.put.options import PutOptions
from redrb.stream.put.preparer import Groups, Items, as_list, groups_of
from redrb.stream.put.rights import Rights


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """A batch whose rows with the same `group_id` are one group; a row without one is a group."""

    experience: Experience

    def rows(self) -> list[list[int]]:
        """Return the row numbers of each group, groups in the order of their first rows."""
        size = batch_size(self.experience)
        found: dict[object, list[int]] = {}
        for row, group_id in enumerate(per_sample(self.experience, "group_id", size)):
            found.setdefault(row if group_id is None else group_id, []).append(row)
        return list(found.values())

    def groups(self) -> list[list[BufferItem]]:
        """Return the samples of each group."""
        items = split_experience_batch(self.experience)
        return [[items[row] for row in rows] for rows in self.rows()]


@dataclass(slots=True, eq=False)
class SendJob:
    """Experience for one stream, and the options of its put.

    Attributes:
        groups: Groups in it that are not stored, before filters.
        nbytes: Bytes of its tensors.
        copies: Events of copies from accelerators that may still be under way.
        trouble: Why it cannot be put now; None: it is not known to be in trouble.
    """

    items: Experience | GroupedRows | list[BufferItem]
    groups: int
    nbytes: int
    options: PutOptions
    copies: Sequence[torch.cuda.Event] = ()
    trouble: StoreError | None = None

    @classmethod
    def of(cls, items: Items | GroupedRows, options: PutOptions) -> SendJob:
        """Count groups and bytes; raises RecordError for other items, or fields of another type."""
        if isinstance(items, Experience):
            return cls(items, batch_size(items), _nbytes(items), options)
        if isinstance(items, GroupedRows):
            return cls(items, len(items.rows()), _nbytes(items.experience), options)
        samples = [items] if isinstance(items, BufferItem) else as_list(items, "samples")
        for item in samples:
            if not isinstance(item, BufferItem):
                raise RecordError(f"a group holds a {type(item).__name__}: give redrb.BufferItem.")
        return cls(list(samples), min(1, len(samples)), sum(map(_nbytes, samples)), options)

    def as_groups(self) -> Groups:
        """Return the groups to put."""
        items = self.items
        return items.groups() if isinstance(items, GroupedRows) else groups_of(items)

    def part(self, first: int, step: int) -> SendJob:
        """Return every `step`-th group from `first` on; views of tensors where rows are groups."""
        groups = len(range(first, self.groups, step))
        if step == 1 or (isinstance(self.items, list) and groups):
            return replace(self)
        if isinstance(self.items, list):
            return replace(self, items=[], groups=0, nbytes=0)
        items: Experience | GroupedRows
        if isinstance(self.items, GroupedRows):
            chosen = [row for rows in self.items.rows()[first::step] for row in rows]
            items = GroupedRows(select_rows(self.items.experience, chosen))
        else:
            every = range(first, self.groups, step)
            items = select_rows(self.items, every, lambda tensor: tensor[first::step])
        return SendJob.of(items, self.options)

    def copied(self) -> SendJob:
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

    def use(self, admission: Admission | None) -> None:
        """Take the rights that its groups use over."""
        if admission is not None:
            self.options = replace(self.options, admission=admission.hand_over(self.groups))

    def return_rights(self) -> None:
        """Return its rights of admission, as it is given up."""
        if isinstance(self.options.admission, Rights):
            self.options.admission.end(0, counted=False)


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
