"""Loading fetched versions into a reader's target, and the version that the target has."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

from torch import nn

from redrb.errors import RedrbError, WeightMismatch, WeightsTorn
from redrb.weights.reading.adapter_loading import AdapterLoader
from redrb.weights.reading.catalogue import Catalogue, Pin
from redrb.weights.reading.state_copies import FetchedVersion, InPlaceCopy
from redrb.weights.reading.targets import LoadTarget
from redrb.weights.tensors.names import Target
from redrb.weights.wire.manifest import WeightVersion

Retrying: TypeAlias = Callable[
    [InPlaceCopy, Callable[[Pin], WeightVersion | None]], WeightVersion | None
]


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
                is_module = isinstance(target, nn.Module) or len(_modules(target)) == len(target)
                selection.load(fetched.state, adopt=fetched.shared and is_module)
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

    def poll_in_place(
        self,
        target: Target,
        selection: LoadTarget,
        lock: AbstractContextManager[object],
        retrying: Retrying,
    ) -> WeightVersion | None:
        """Receive the newest version into the target's tensors, under `lock`.

        Args:
            target: The target.
            selection: Its tensors.
            lock: The lock of the tensors.
            retrying: Runs an attempt, and repeats it if chunks were gone or damaged.

        Returns:
            The version, or None if nothing is newer.

        Raises:
            WeightsTorn: The fetch broke off after the first tensor had changed.
        """
        copy = self.in_place = self.in_place or InPlaceCopy(self._catalogue, selection)
        copy.selection = selection
        if not copy.torn and self._catalogue.other_than(self.version or 0) is None:
            return None  # without waiting for the lock
        with lock:
            try:
                found = retrying(copy, lambda pin: self._receive(copy, pin, target))
            except BaseException as error:
                if copy.torn:
                    self.version = None
                if self.version is None and copy.written and isinstance(error, RedrbError):
                    raise self._torn(str(error)) from error
                raise
            if copy.torn:  # and no version is left that could mend it
                self.version = None
                raise self._torn("Nothing is published any more.")
            return found

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

    def _receive(self, copy: InPlaceCopy, pin: Pin, target: Target) -> WeightVersion | None:
        used = self.version or 0
        with copy.fetch_newest(pin, used=used, needed=copy.selection.chunks) as fetched:
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

    def _torn(self, why: str) -> WeightsTorn:
        return WeightsTorn(
            f"weights {self._catalogue.name!r}: an update in place broke off, so that the model "
            f"holds a mixture of versions: poll again before it is used. {why}"
        )


def _modules(target: Target) -> list[nn.Module]:
    parts = [target] if isinstance(target, nn.Module) else target.values()
    return [part for part in parts if isinstance(part, nn.Module)]
