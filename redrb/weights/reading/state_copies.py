"""`StateCopy`: where a reader keeps a state: private memory, or the live tensors themselves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from redrb.errors import ConfigError, DecodeError, WeightCorrupt
from redrb.weights.reading.catalogue import Pin, Step
from redrb.weights.reading.replica import Replica, Transfer
from redrb.weights.reading.targets import LoadTarget, named_tensors
from redrb.weights.tensors.state import State
from redrb.weights.wire.layout import Layout
from redrb.weights.wire.lora_config import LoraConfig
from redrb.weights.wire.manifest import WeightVersion

Needed = Callable[[Layout], Collection[int] | None]
"""Returns the chunks of a layout that are needed, None for all, or raises WeightMismatch."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A fetched LoRA adapter: `<layer>.lora_A` and `<layer>.lora_B` by name, settings by layer."""

    tensors: dict[str, Tensor]
    configs: dict[str, LoraConfig]


@dataclass(frozen=True, slots=True)
class FetchedVersion:
    """A version that was fetched and checked.

    Attributes:
        described: The version as users see it.
        state: Its state; None for an adapter whose base was never published.
        adapter: The adapter that belongs on top of the state, if the version is one.
        shared: Whether the state is in the host's shared memory, which nobody writes to while a
            tensor uses it: tensors may use that memory instead of being copied to.
    """

    described: WeightVersion
    state: State | None
    adapter: Adapter | None
    shared: bool = False


class StateCopy(Protocol):
    """A copy of the state that is updated from version to version."""

    def fetch_newest(
        self, pin: Pin, *, used: int, needed: Needed
    ) -> AbstractContextManager[FetchedVersion | None]:
        """Fetch the newest version unless it is `used`; it does not change inside the `with`."""

    def forget(self) -> None:
        """Drop the content, because it is damaged: the next version is fetched in full."""


class PrivateCopy:
    """A state in private memory, which a replica brings from version to version."""

    def __init__(self) -> None:
        self._replica: Replica | None = None

    def fetch_newest(
        self, pin: Pin, *, used: int, needed: Needed
    ) -> AbstractContextManager[FetchedVersion | None]:
        """Fetch the newest version unless it is `used`."""
        have = self._replica.version if self._replica is not None else 0
        steps = pin.route(have=have, used=used)
        return nullcontext(self.follow(pin, steps, needed) if steps else None)

    def forget(self) -> None:
        """Drop the content; the memory is used again if the layout fits."""
        if self._replica is not None:
            self._replica.manifest = None

    def follow(self, pin: Pin, steps: Sequence[Step], needed: Needed) -> FetchedVersion:
        """Fetch the version that the steps lead to."""
        transfer = Transfer(pin)
        states, adapter = split_adapter(steps)
        state = None
        if states:
            layout = layout_of(states, self._replica.layout if self._replica is not None else None)
            replica = self._replica = self._fitting(layout, needed(layout))
            for step in states:
                replica.follow(step, transfer)
            state = replica.state
        fetched = fetch_adapter(adapter, transfer) if adapter is not None else None
        return FetchedVersion(steps[-1].described, state, fetched)

    def _fitting(self, layout: Layout, needed: Collection[int] | None) -> Replica:
        """Return a replica for a layout: the present one if it has the needed chunks."""
        old = self._replica
        if old is None or old.layout != layout:
            return Replica(State(layout), needed)
        if old.needed is None or (needed is not None and set(needed) <= set(old.needed)):
            return old
        if old.manifest is not None:  # the chunks that it lacks are not known to be of its version
            raise WeightCorrupt("more chunks are needed than before: all are fetched.")
        return Replica(old.state, needed)


class InPlaceCopy(PrivateCopy):
    """A state in the live tensors themselves, if they can hold it; the caller holds their lock."""

    def __init__(self, selection: LoadTarget) -> None:
        super().__init__()
        self.selection = selection
        self._settled = 0

    @property
    def torn(self) -> bool:
        """Whether the live tensors were written to since `settle`."""
        return self._replica is not None and self._replica.changes != self._settled

    def settle(self) -> None:
        """Note that the live tensors hold one whole version."""
        self._settled = self._replica.changes if self._replica is not None else 0

    @property
    def written(self) -> bool:
        """Whether the live tensors were ever written to."""
        return self._replica is not None

    def follow(self, pin: Pin, steps: Sequence[Step], needed: Needed) -> FetchedVersion:
        """Fetch the version that the steps lead to, or raise ConfigError."""
        if len(steps) > 1 and steps[-1].how == "lora":
            raise ConfigError(
                "an adapter on top of published weights cannot be loaded in place: leave in_place "
                "out."
            )
        return super().follow(pin, steps, needed)

    def _fitting(self, layout: Layout, needed: Collection[int] | None) -> Replica:
        old = self._replica if self._replica and self._replica.layout == layout else None
        # looked up each time, since the model may have new tensors
        live = self.selection.live(layout)
        replica = Replica(State(layout, live, memory=old.state.memory if old else None), needed)
        replica.changes = self._replica.changes if self._replica else 0
        if old is not None and old.needed == needed:
            replica.manifest = old.manifest
        return replica


def split_adapter(steps: Sequence[Step]) -> tuple[list[Step], Step | None]:
    """Return the steps to a state, and the step to the adapter on top of it, if there is one."""
    adapter = steps[-1] if steps and steps[-1].how == "lora" else None
    return [step for step in steps if step is not adapter], adapter


def layout_of(states: Sequence[Step], loaded: Layout | None) -> Layout:
    """Return the layout of the state that steps lead to; `loaded` is that of the version before."""
    layout = states[0].manifest.layout if states[0].how != "delta" else None
    layout = layout or loaded
    if layout is None:
        raise WeightCorrupt("a delta to a version that was never loaded.")
    return layout


def fetch_adapter(step: Step, transfer: Transfer) -> Adapter:
    """Return an adapter, or raise DecodeError."""
    manifest = step.manifest
    if manifest.layout is None or manifest.adapter is None:
        raise DecodeError(f"version {manifest.version} is no adapter.")
    state = State(manifest.layout)
    transfer.chunks(manifest, state, None)
    return Adapter(dict(named_tensors(state)), manifest.adapter)
