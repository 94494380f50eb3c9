"""`Placer`: pads batches and puts them on a device, beside the work that goes on there."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from redrb.errors import ConfigError
from redrb.experience import Experience
from redrb.experience.padding import check_side
from redrb.experience.records import Side, named_tensors
from redrb.stream import Lease
from redrb.stream.arguments import checked_tensors


@dataclass(frozen=True, slots=True)
class PlacedBatch:
    """A batch on its device, or on its way there.

    Attributes:
        batch: The batch; copies of its tensors may still be under way.
        copied: Event on the device that marks the end of the copies; None: there are none.
    """

    batch: Experience
    copied: torch.cuda.Event | None = None

    def ready(self) -> Experience:
        """Return the batch, for work that is queued on the current stream from now on.

        The CPU does not wait. The memory belongs to the stream of the copies; `record_stream`
        keeps the allocator from giving it to the next copy too early.
        """
        if self.copied is not None:
            tensors = list(named_tensors(self.batch).values())
            stream = torch.cuda.current_stream(tensors[0].device)
            stream.wait_event(self.copied)
            for tensor in tensors:
                tensor.record_stream(stream)
        return self.batch


class Placer:
    """Pads the groups of a lease into a batch and puts it on a device; belongs to one thread."""

    def __init__(
        self,
        device: str | torch.device,
        side: Side,
        *,
        pin_memory: bool,
        tensors: Collection[str] | None,
    ) -> None:
        """Choose device and tensors; raises ConfigError if there is no such device."""
        try:
            self._device = torch.device(device)
            # each thread has a current device: the one of this thread counts
            self._cuda = _cuda_device(self._device, pin_memory=pin_memory)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"device={device!r}: {str(error).splitlines()[0]}") from error
        self._side = check_side(side)
        self._tensors = checked_tensors(tensors)
        self._pin_memory = pin_memory  # from other memory a copy waits for other work
        self._stream: torch.cuda.Stream | None = None

    def place(self, lease: Lease) -> PlacedBatch:
        """Return the batch of a lease."""
        if self._device.type == "cuda" and self._cuda is not None:
            return self._copied(lease, self._cuda)
        batch = self._batch(lease, self._device)
        if self._pin_memory and self._device.type == "cpu":
            with torch.cuda.device(self._cuda) if self._cuda is not None else nullcontext():
                batch.pin_memory()
        return PlacedBatch(batch)

    def _batch(self, lease: Lease, device: torch.device) -> Experience:
        pin_memory, tensors = self._pin_memory, self._tensors
        return lease.batch(device, side=self._side, pin_memory=pin_memory, tensors=tensors)

    def _copied(self, lease: Lease, device: torch.device) -> PlacedBatch:
        """Copy on a separate CUDA stream, so that the copy waits for no training step."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            batch = self._batch(lease, device)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        return PlacedBatch(batch, copied)


def _cuda_device(device: torch.device, *, pin_memory: bool) -> torch.device | None:
    """Return the GPU for copies or for pinned memory; None without one."""
    if device.type == "cuda" and device.index is not None:
        return device
    if device.type == "cuda" or (pin_memory and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return None
