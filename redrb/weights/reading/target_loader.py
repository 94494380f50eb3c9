"""Loading fetched versions into a reader's target, and the version that the target has."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn

from redrb.errors import WeightMismatch
from redrb.weights.reading.adapter_loading import AdapterLoader
from redrb.weights.reading.catalogue import Catalogue, Pin
from redrb.weights.reading.load_target import LoadTarget
from redrb.weights.reading.state_copies import FetchedVersion, InPlaceCopy
from redrb.weights.tensors.names import Target
from redrb.weights.wire.manifest import WeightVersion


class TargetLoader:
    """Loads versions, states and adapters, into one target at a time.

    Attributes:
        version: The version that the target has; None before the first, and while it holds a
            mixture.
        in_place: The state in the target's own tensors, once `poll(in_place=True)` was called.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._adapters = AdapterLoader()
        self._modules: list[weakref.ref[nn.Module]] = []
        self.version: int | None = None
        self.in_place: InPlaceCopy | None = None

    def set_target(self, target: Target) -> None:
        """Note the target; if its modules are others than before, nothing is loaded any more."""
        modules = _modules(target)
        before, self._modules = self._modules, [weakref.ref(module) for module in modules]
        if before and modules != [reference() for reference in before]:
            self.version = self.in_place = None
            self._adapters = AdapterLoader()

    def plan(
        self, target: Target, selection: LoadTarget, fetched: FetchedVersion
    ) -> Callable[[], None]:
        """Check a fetched version; return a function that loads it, for the lock's holder.

        Raises:
            WeightMismatch: The version does not fit the target.
        """
        load_adapter = self._adapters.plan(target, selection, fetched)

        def load() -> None:
            if fetched.state is not None:
                adopt = fetched.shared and _is_all_modules(target)
                selection.load(fetched.state, adopt=adopt)
            load_adapter()

        return load

    def run(self, load: Callable[[], None], fetched: FetchedVersion) -> None:
        """Call `load`, and note the version; if it breaks off, the target has no version."""
        self.version, before = None, self.version
        try:
            load()
        except WeightMismatch:  # found before any tensor changed
            self.version = before
            raise
        self.loaded(fetched.described.version)

    def load_in_place(self, copy: InPlaceCopy, pin: Pin, target: Target) -> WeightVersion | None:
        """Receive the newest version into the target's tensors; the caller holds their lock.

        Returns:
            The version, or None if nothing is newer.
        """
        used = self.version or 0
        with copy.current(pin, used=used, needed=copy.selection.chunks) as fetched:
            if fetched is None:
                return None
            self.version, before = None, self.version
            load_adapter = self._adapters.plan(target, copy.selection, fetched)
            if fetched.state is None:
                self.version = before  # nothing has changed yet
            else:
                copy.selection.load(fetched.state)
            load_adapter()
            self.loaded(fetched.described.version)
            return fetched.described

    def loaded(self, version: int | None) -> None:
        """Note the version that the target has from now on; None for a mixture."""
        self.note(version)
        if version is not None and self.in_place is not None:
            self.in_place.settle()

    def note(self, version: int | None) -> None:
        """Note the version, of which an engine may have taken the tensors."""
        self.version = version
        if version is not None:
            self._catalogue.loaded(version)


def _modules(target: Target) -> list[nn.Module]:
    parts = [target] if isinstance(target, nn.Module) else target.values()
    return [part for part in parts if isinstance(part, nn.Module)]


def _is_all_modules(target: Target) -> bool:
    return isinstance(target, nn.Module) or len(_modules(target)) == len(target)
