"""`PreparedLoad`: fetches a version beside the one in use, and loads it later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TypeAlias

from redrb.errors import ConfigError, WeightMismatch
from redrb.weights.reading.catalogue import Catalogue, Pin
from redrb.weights.reading.state_copies import FetchedVersion, StateCopy
from redrb.weights.reading.targets import LoadTarget
from redrb.weights.tensors.fitting import target_shards
from redrb.weights.tensors.names import Target
from redrb.weights.wire.manifest import WeightVersion

FetchResult: TypeAlias = "tuple[FetchedVersion | None, ExitStack]"
"""The fetched version, None if there is none, and the scope that releases it."""


@dataclass(frozen=True, slots=True, eq=False)
class SubscriberAccess:
    """The parts of a subscriber that a `PreparedLoad` uses.

    Attributes:
        catalogue: The versions.
        copy: The copy that versions are fetched into.
        lock: Held while tensors change.
        reading: Held while the copy changes, and while it is loaded.
        version: Returns the version that was loaded last, None before the first.
        loaded: Notes the version that the target has; None for a mixture.
        wait: `wait(version, seconds)` returns the newest version if it is another one, after
            waiting for one at most that long.
        retrying: Runs an attempt to fetch, and repeats it if chunks were gone or damaged.
        plan: Checks a fetched version and returns a function that loads it, under the lock.
        release: Makes the subscriber usable by others again.
    """

    catalogue: Catalogue
    copy: StateCopy
    lock: AbstractContextManager[object]
    reading: threading.Lock
    version: Callable[[], int | None]
    loaded: Callable[[int | None], None]
    wait: Callable[[int, float], WeightVersion | None]
    retrying: Callable[[StateCopy, Callable[[Pin], FetchResult]], FetchResult]
    plan: Callable[[Target, LoadTarget, FetchedVersion], Callable[[], None]]
    release: Callable[[], None]


class PreparedLoad:
    """The newest version for one target: `fetch` fetches it, `load` loads it.

    Two threads may call them; `load` never waits for `fetch`.

    Attributes:
        access: The subscriber's parts.
        ready: The version that `load` would load, or None.
    """

    def __init__(self, access: SubscriberAccess, target: Target, selection: LoadTarget) -> None:
        self.access = access
        self._target = target
        self._selection = selection
        self._fetched: FetchedVersion | None = None
        self._scope = ExitStack()
        self._closed = False
        self.ready: int | None = None

    @property
    def version(self) -> int | None:
        """The version that was loaded last; None before the first, and after loading broke off."""
        return self.access.version()

    @property
    def newest(self) -> int:
        """The newest version that is ready or loaded, 0 if there is none."""
        return self.ready or self.version or 0

    def fetch(self) -> bool:
        """Fetch the newest version, unless it is ready or loaded; returns whether it was fetched.

        A fetch drops the version that was ready before.

        Raises:
            WeightMismatch: Names, shapes or dtypes differ.
            WeightError, DecodeError, StoreUnavailable: As `WeightSubscriber.poll` does.
        """
        with self.access.reading:
            if self._closed or self.access.catalogue.other_than(self.newest) is None:
                return False
            self._drop()
            fetched, scope = self.access.retrying(self.access.copy, self._attempt)
            if fetched is None:  # the newer version was deleted meanwhile
                return False
            self._fetched, self._scope = fetched, scope
            self.ready = fetched.described.version
            return True

    def load(self) -> int | None:
        """Load the fetched version; the caller holds the lock of the tensors.

        All of it is checked before the first tensor changes. If loading breaks off nevertheless,
        `version` is None and the next call loads all of it again.

        Returns:
            The version, or None if no version is ready or a fetch is under way.

        Raises:
            WeightMismatch: The version does not fit the target; nothing was loaded.
        """
        if not self.access.reading.acquire(blocking=False):
            return None
        try:
            if self._fetched is None:
                return None
            self._load(self._fetched)
            self._drop()
            return self.version
        except WeightMismatch:
            self._drop()
            raise
        finally:
            self.access.reading.release()

    def close(self) -> None:
        """Drop the fetched version and release the subscriber; waits for a fetch under way."""
        with self.access.reading:
            if not self._closed:
                self._closed = True
                self._drop()
                self.access.release()

    def _attempt(self, pin: Pin) -> FetchResult:
        with ExitStack() as scope:
            used = self.version or 0
            context = self.access.copy.fetch_newest(pin, used=used, needed=self._selection.chunks)
            return scope.enter_context(context), scope.pop_all()

    def _load(self, fetched: FetchedVersion) -> None:
        # looked up each time, since the model may have new tensors
        selection = LoadTarget(target_shards(self._target), self._selection.strict)
        state = fetched.state
        if state is not None and not selection.chunks(state.layout) <= self._selection.chunks(
            state.layout
        ):
            raise WeightMismatch(
                f"weights {self.access.catalogue.name!r}: the model has other tensors than when "
                "this standby was created: close it and create a new one."
            )
        load = self.access.plan(self._target, selection, fetched)
        try:
            load()
        except BaseException:
            self.access.loaded(None)
            raise
        self.access.loaded(fetched.described.version)

    def _drop(self) -> None:
        self.ready = self._fetched = None
        self._scope.close()


def subscriber_in_use(name: str) -> ConfigError:
    """Return the error of a call on a subscriber whose copy a `PreparedLoad` uses."""
    return ConfigError(
        f"a standby of this subscriber fetches the versions of weights {name!r}: call the "
        "standby's swap(), or close it first."
    )
