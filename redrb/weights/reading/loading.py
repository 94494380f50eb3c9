"""Loading fetched versions into a reader's target, and the version that the target has."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Final, TypeVar

from torch import nn

from redrb.errors import ConfigError, RedrbError, WeightMismatch, WeightsTorn
from redrb.weights.lora.merging import LoraMerger
from redrb.weights.reading.catalogue import Catalogue, Pin, fetching
from redrb.weights.reading.shared_copy import SharedCopy
from redrb.weights.reading.state_copies import Adapter, FetchedVersion, InPlaceCopy, PrivateCopy
from redrb.weights.reading.targets import LoadTarget
from redrb.weights.tensors.state import load_in_place, synchronize
from redrb.weights.wire.manifest import WeightVersion

T = TypeVar("T")


class AdapterLoader:
    """Loads adapters into one target, and keeps the base of each weight that it merged one into."""

    def __init__(self) -> None:
        self._mergers: dict[str, tuple[nn.Module, LoraMerger]] = {}

    def plan(self, selection: LoadTarget, fetched: FetchedVersion) -> Callable[[], None]:
        """Check an adapter; return a function that loads it, for use after the state is loaded."""
        models, adapter = selection.models, fetched.adapter
        if adapter is None:
            return lambda: self._forget(fetched)
        if not models:
            return _into_dict(selection, adapter)
        planned = []
        for model, module in models.items():
            known, merger = self._mergers.get(model, (None, None))
            if merger is None or known is not module:
                merger = LoraMerger(module)
                self._mergers[model] = module, merger
            tensors = _of_model(model, adapter.tensors)
            if tensors:
                configs = _of_model(model, adapter.configs)
                planned.append((merger, merger.plan(tensors, configs)))
        if not planned:
            raise WeightMismatch(f"the adapter has no layers of the models {', '.join(models)}.")

        def apply() -> None:
            self._forget(fetched)
            for merger, changes in planned:
                merger.apply(changes)

        return apply

    def _forget(self, fetched: FetchedVersion) -> None:
        """Take the weights that were just loaded as the new bases for adapters."""
        if fetched.state is not None:
            loaded = {entry.name: entry for entry in fetched.state.layout.tensors}
            for model, (_, merger) in self._mergers.items():
                merger.forget(_of_model(model, loaded))


def _of_model(model: str, named: Mapping[str, T]) -> dict[str, T]:
    """Return what belongs to a model, by the names that the model uses."""
    begin = f"{model}." if model else ""
    return {
        name.removeprefix(begin): value for name, value in named.items() if name.startswith(begin)
    }


def _into_dict(selection: LoadTarget, adapter: Adapter) -> Callable[[], None]:
    targets = selection.targets
    for name, value in adapter.tensors.items():
        if name not in targets:  # whatever `strict` is: the dict would not hold this version
            raise WeightMismatch(
                f"the newest version is an adapter, and the dict has no {name!r}: give a module, "
                "into which it can be merged."
            )
        if tuple(value.shape) != targets[name].shape:
            shape = list(targets[name].shape)
            raise WeightMismatch(f"{name!r} is {list(value.shape)}, in the dict {shape}.")

    def load() -> None:
        for name, value in adapter.tensors.items():
            load_in_place(targets[name], value)
        synchronize(targets[name].tensor for name in adapter.tensors)

    return load


BUSY_S: Final = 60.0
"""How long a call waits for another thread's call on the same subscriber."""


class TargetLoader:
    """Fetches versions, states and adapters, and loads them into one target at a time.

    Attributes:
        copy: The copy that versions are fetched into.
        lock: Held while tensors change.
        reading: Held while the copy changes, and while it is loaded.
        in_use: Whether a `PreparedLoad` has the copy for itself.
        version: The version that the target has; None before the first, and while it holds a
            mixture.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        copy: PrivateCopy | SharedCopy,
        lock: AbstractContextManager[object],
    ) -> None:
        self.catalogue = catalogue
        self.copy = copy
        self.lock = lock
        self.reading = threading.Lock()
        self.in_use = False
        self.version: int | None = None
        self._in_place: InPlaceCopy | None = None
        self._adapters = AdapterLoader()
        self._modules: list[weakref.ref[nn.Module]] = []

    @contextmanager
    def used_for(self, selection: LoadTarget) -> Iterator[None]:
        """Use the copy in this thread alone; for modules others than before, nothing is loaded."""
        self._check_unused()  # first: a fetch under way is not waited for
        name = self.catalogue.name
        if not self.reading.acquire(timeout=BUSY_S):
            raise ConfigError(
                f"another thread has used this subscriber of weights {name!r} for {BUSY_S:g} s: "
                "its fetch is slow, or it waits for the lock, which this thread must not hold "
                "while it calls."
            )
        try:
            self._check_unused()
            modules = list(selection.models.values())
            before, self._modules = self._modules, [weakref.ref(module) for module in modules]
            if before and modules != [reference() for reference in before]:
                self.version = self._in_place = None
                self._adapters = AdapterLoader()
            yield
        finally:
            self.reading.release()

    def poll(self, selection: LoadTarget) -> WeightVersion | None:
        """Fetch the newest version and load it under `lock`; None if it is loaded already."""
        fetched = self.fetch(selection)
        if fetched is None:
            return None
        load = self.plan(selection, fetched)
        with self.lock:
            load()
        return fetched.described

    def fetch(self, selection: LoadTarget) -> FetchedVersion | None:
        """Fetch the newest version into the copy; None if it is loaded already."""

        def attempt(pin: Pin) -> FetchedVersion | None:
            used = self.version or 0
            return self.copy.reach(pin, used=used, needed=selection.chunks)

        return fetching(self.catalogue, self.copy.forget, attempt)

    def plan(self, selection: LoadTarget, fetched: FetchedVersion) -> Callable[[], None]:
        """Check a fetched version; return a function that loads it, for the lock's holder.

        If it breaks off, the target has no version.
        """
        load_adapter = self._adapters.plan(selection, fetched)

        def load() -> None:
            self.version, before = None, self.version
            try:
                if fetched.state is not None:
                    selection.load(fetched.state, adopt=fetched.loaded is not None)
                load_adapter()
            except WeightMismatch:  # found before any tensor changed
                self.version = before
                raise
            self.version = fetched.described.version
            self.catalogue.used = fetched.described
            if fetched.loaded is not None:
                fetched.loaded()
            if self._in_place is not None:
                self._in_place.settle()

        return load

    def poll_in_place(self, selection: LoadTarget) -> WeightVersion | None:
        """Receive the newest version into the target's tensors, under `lock`; None as in `poll`."""
        copy = self._in_place = self._in_place or InPlaceCopy(selection)
        copy.selection = selection
        if not copy.torn and self.catalogue.other_than(self.version or 0) is None:
            return None  # without waiting for the lock

        def receive(pin: Pin) -> WeightVersion | None:
            used = self.version or 0
            fetched = copy.reach(pin, used=used, needed=copy.selection.chunks)
            if fetched is None:
                return None
            if fetched.state is not None:  # the tensors have changed
                self.version = None
            self.plan(copy.selection, fetched)()
            return fetched.described

        with self.lock:
            try:
                found = fetching(self.catalogue, copy.forget, receive)
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

    def _check_unused(self) -> None:
        if self.in_use:
            raise ConfigError(
                "a standby of this subscriber fetches the versions of weights "
                f"{self.catalogue.name!r}: call the standby's swap(), or close it first."
            )

    def _torn(self, why: str) -> WeightsTorn:
        return WeightsTorn(
            f"weights {self.catalogue.name!r}: an update in place broke off, so that the model "
            f"holds a mixture of versions: poll again before it is used. {why}"
        )
