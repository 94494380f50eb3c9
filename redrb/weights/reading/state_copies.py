"""Copies of a state that readers keep: in private memory, or in the live tensors themselves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from redrb.errors import ConfigError, DecodeError, WeightCorrupt
from redrb.weights.lora.names import layer_name, lora_name, pairs
from redrb.weights.reading.catalogue import Catalogue, Pin, Step, fetching
from redrb.weights.reading.replica import Replica, fetch_chunks
from redrb.weights.reading.targets import LoadTarget, named_tensors
from redrb.weights.tensors.state import StateBytes
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

    def of(self, prefix: str) -> Adapter:
        """Return the layers whose names begin with `prefix`, without it, or raise ConfigError."""
        tensors: dict[str, Tensor] = {}
        configs: dict[str, LoraConfig] = {}
        known = {layer_name(name): config for name, config in self.configs.items()}
        for name, halves in pairs(self.tensors).items():
            if name.startswith(prefix):
                layer = name.removeprefix(prefix)
                configs[layer] = known[name]
                tensors |= {
                    lora_name(layer, half): each for half, each in zip("AB", halves, strict=True)
                }
        if not configs:
            raise ConfigError(
                f"the adapter has no layers of which the name begins with {prefix!r}."
            )
        return Adapter(tensors, configs)


@dataclass(frozen=True, slots=True)
class FetchedVersion:
    """A version that was fetched and checked.

    Attributes:
        state: Its state; None for an adapter whose base was never published.
        adapter: The adapter that belongs on top of the state, if the version is one.
        loaded: Called after it was loaded. It is given if the state is in the host's shared memory,
            which nobody writes to while a tensor uses it: tensors may use that memory instead of
            being copied to.
    """

    described: WeightVersion
    state: StateBytes | None
    adapter: Adapter | None
    loaded: Callable[[], None] | None = None


class PrivateCopy:
    """A state in private memory, which a replica brings from version to version."""

    def __init__(self) -> None:
        self._replica: Replica | None = None

    def reach(
        self, pin: Pin, *, needed: Needed, used: int = 0, wanted: int = 0
    ) -> FetchedVersion | None:
        """Fetch a version, default the newest unless it is `used`; it stays until the next call."""
        steps = pin.route(have=self._version, wanted=wanted, used=used)
        return self.follow(pin, steps, needed) if steps else None

    def fetch(
        self,
        catalogue: Catalogue,
        version: int | None = None,
        *,
        only_adapter: bool = False,
        with_base: bool = False,
    ) -> FetchedVersion:
        """Fetch a version, default the newest, by deltas if they lead to it from the content.

        Args:
            only_adapter: Fetch an adapter without its base, and nothing of another version.
            with_base: Return the base of an adapter as the state, fetched if it is not held.

        Raises:
            WeightError: There is no such version.
        """

        def attempt(pin: Pin) -> FetchedVersion:
            steps = pin.route(have=self._version, wanted=version or 0)
            if not steps:
                raise catalogue.missing(version)
            if with_base:
                found = self.follow(pin, steps, lambda _: None)
                return replace(found, state=self._replica.state if self._replica else None)
            if steps[-1].how == "lora":
                steps = steps[-1:]
            elif only_adapter:
                return FetchedVersion(steps[-1].described, None, None)
            return self.follow(pin, steps, lambda _: None)

        return fetching(catalogue, self.forget, attempt)

    @property
    def _version(self) -> int:
        return self._replica.version if self._replica is not None else 0

    def forget(self) -> None:
        """Drop the content, because it is damaged: the next version is fetched in full.

        The memory is used again if the layout fits.
        """
        if self._replica is not None:
            self._replica.manifest = None

    def follow(self, pin: Pin, steps: Sequence[Step], needed: Needed) -> FetchedVersion:
        """Fetch the version that the steps lead to."""
        states, state = states_of(steps), None
        if states:
            layout = layout_of(states, self._replica.layout if self._replica is not None else None)
            replica = self._replica = self._fitting(layout, needed(layout))
            for step in states:
                replica.follow(step, pin)
            state = replica.state
        return FetchedVersion(steps[-1].described, state, fetch_adapter(steps[-1], pin))

    def _fitting(self, layout: Layout, needed: Collection[int] | None) -> Replica:
        old = self._replica
        if old is None or old.layout != layout:
            return Replica(StateBytes(layout), needed)
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

    @property
    def torn(self) -> bool:
        """Whether the live tensors were written to since `settle`."""
        return self._replica is not None and self._replica.torn

    def settle(self) -> None:
        """Note that the live tensors hold one whole version."""
        if self._replica is not None:
            self._replica.torn = False

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
        replica = Replica(
            StateBytes(layout, live, memory=old.state.memory if old else None), needed
        )
        replica.torn = self.torn
        if old is not None and old.needed == needed:
            replica.manifest = old.manifest
        return replica


def states_of(steps: Sequence[Step]) -> list[Step]:
    """Return the steps to a state, without the last one to an adapter on top of it."""
    return [step for step in steps if step.how != "lora"]


def layout_of(states: Sequence[Step], loaded: Layout | None) -> Layout:
    """Return the layout of the state that steps lead to; `loaded` is that of the version before."""
    layout = states[0].manifest.layout if states[0].how != "delta" else None
    layout = layout or loaded
    if layout is None:
        raise WeightCorrupt("a delta to a version that was never loaded.")
    return layout


def fetch_adapter(step: Step, pin: Pin) -> Adapter | None:
    """Return the adapter that the last step leads to, None if it leads to a state."""
    manifest = step.manifest
    if step.how != "lora":
        return None
    if manifest.layout is None or manifest.adapter is None:
        raise DecodeError(f"version {manifest.version} is no adapter.")
    state, pin.version = StateBytes(manifest.layout), manifest.version
    fetch_chunks(pin, manifest, state)
    return Adapter(dict(named_tensors(state)), manifest.adapter)
