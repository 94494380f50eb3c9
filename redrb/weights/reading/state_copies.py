"""Where a reader keeps the state: in memory of its own, or in the live tensors themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from redrb.errors import ConfigError, DecodeError, WeightCorrupt
from redrb.weights.lora import LoraConfig, configs_from_wire
from redrb.weights.reading.catalogue import Catalogue, Pin, Step
from redrb.weights.reading.load_target import LoadTarget, named_tensors
from redrb.weights.reading.replica import Replica, Transfer
from redrb.weights.tensors.state import State
from redrb.weights.wire.layout import Layout
from redrb.weights.wire.manifest import WeightVersion

Needed = Callable[[Layout], Collection[int] | None]
"""Says which chunks of a layout are needed, None for all, or raises WeightMismatch."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA that was fetched: `<layer>.lora_A`, `<layer>.lora_B`, and settings by layer."""

    tensors: dict[str, Tensor]
    configs: dict[str, LoraConfig]


@dataclass(frozen=True, slots=True)
class FetchedVersion:
    """The newest version, fetched.

    Attributes:
        described: The version.
        state: Its state; None where it is an adapter for weights that were never published.
        adapter: The adapter that belongs on top, if it is one.
        shared: Its memory is the host's, and stays as it is as long as a tensor has it: tensors may
            be put there instead of copied to.
    """

    described: WeightVersion
    state: State | None
    adapter: Adapter | None
    shared: bool = False


class StateCopy(Protocol):
    """Keeps a state from version to version."""

    def current(
        self, pin: Pin, *, used: int, needed: Needed
    ) -> AbstractContextManager[FetchedVersion | None]:
        """Fetch the newest version, if it is newer than `used`; it stays as it is meanwhile."""

    def forget(self) -> None:
        """Begin anew: something was wrong with it."""


class _FetchedCopy(ABC):
    """Follows versions with a replica of its own."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._replica: Replica | None = None

    def current(
        self, pin: Pin, *, used: int, needed: Needed
    ) -> AbstractContextManager[FetchedVersion | None]:
        """Fetch the newest version, if it is newer than `used`."""
        have = self._replica.version if self._replica is not None else 0
        steps = pin.route(have=have, used=used)
        return nullcontext(self.follow(pin, steps, needed) if steps else None)

    def forget(self) -> None:
        """Begin anew, in the same memory if it fits."""
        if self._replica is not None:
            self._replica.version = 0

    def follow(self, pin: Pin, steps: Sequence[Step], needed: Needed) -> FetchedVersion:
        """Fetch what the steps lead to."""
        transfer = Transfer(self._catalogue.everywhere, self._catalogue.keys, pin.renew)
        states, adapter = split(steps)
        state = None
        if states:
            layout = layout_of(states, self._replica)
            replica = self._replica = self._fitting(layout, needed(layout))
            for step in states:
                replica.follow(step, transfer)
            state = replica.state
        fetched = fetch_adapter(adapter, transfer) if adapter is not None else None
        return FetchedVersion(steps[-1].described, state, fetched)

    @abstractmethod
    def _fitting(self, layout: Layout, needed: Collection[int] | None) -> Replica:
        """Return a replica for a layout: the one there is, if it has what is needed."""


class PrivateCopy(_FetchedCopy):
    """A state in memory of this reader."""

    def _fitting(self, layout: Layout, needed: Collection[int] | None) -> Replica:
        old = self._replica
        if old is None or old.layout != layout:
            return Replica(State(layout), needed)
        if old.needed is None or (needed is not None and set(needed) <= set(old.needed)):
            return old
        if old.version:  # all of it comes anew: what it has not is not known to be of its version
            raise WeightCorrupt("more tensors are wanted than before.")
        return Replica(old.state, needed)


class InPlaceCopy(_FetchedCopy):
    """A state in the live tensors themselves, as far as it can be; the caller holds their lock."""

    def __init__(self, catalogue: Catalogue, selection: LoadTarget) -> None:
        super().__init__(catalogue)
        self.selection = selection
        self._settled = 0

    @property
    def torn(self) -> bool:
        """Whether the live tensors were written to since `settle`."""
        return self._replica is not None and self._replica.changes != self._settled

    def settle(self) -> None:
        """Note that the live tensors hold what they should."""
        self._settled = self._replica.changes if self._replica is not None else 0

    @property
    def written(self) -> bool:
        """Whether the live tensors were ever written to."""
        return self._replica is not None

    def follow(self, pin: Pin, steps: Sequence[Step], needed: Needed) -> FetchedVersion:
        """Fetch what the steps lead to.

        Raises:
            ConfigError: It is an adapter for weights that were published; nothing was changed.
        """
        if len(steps) > 1 and steps[-1].how == "lora":
            raise ConfigError(
                "an adapter on top of published weights cannot be loaded in place: leave in_place "
                "out."
            )
        return super().follow(pin, steps, needed)

    def _fitting(self, layout: Layout, needed: Collection[int] | None) -> Replica:
        old = self._replica if self._replica and self._replica.layout == layout else None
        # tensors are looked up each time: a model may have got others meanwhile
        live = self.selection.live(layout)
        replica = Replica(State(layout, live, memory=old.state.memory if old else None), needed)
        replica.changes = self._replica.changes if self._replica else 0
        if old is not None and old.needed == needed:
            replica.continue_from(old)
        return replica


def split(steps: Sequence[Step]) -> tuple[list[Step], Step | None]:
    """Return the steps to a state, and the adapter that belongs on top of it."""
    adapter = steps[-1] if steps and steps[-1].how == "lora" else None
    return [step for step in steps if step is not adapter], adapter


def layout_of(states: Sequence[Step], replica: Replica | None) -> Layout:
    """Return the layout of the state that steps lead to.

    Raises:
        WeightCorrupt: It is told by a version that the reader has not.
    """
    layout = states[0].manifest.layout if states[0].how != "delta" else None
    if layout is None and replica is not None:
        layout = replica.layout
    if layout is None:
        raise WeightCorrupt("a delta to a version that was never loaded.")
    return layout


def fetch_adapter(step: Step, transfer: Transfer) -> Adapter:
    """Return an adapter.

    Raises:
        DecodeError: Its settings are damaged.
    """
    manifest = step.manifest
    configs = configs_from_wire(manifest.adapter)
    if manifest.layout is None:
        raise DecodeError(f"version {manifest.version} lists no tensors.")
    state = State(manifest.layout)
    transfer.chunks(manifest, state, None)
    return Adapter(dict(named_tensors(state)), configs)
