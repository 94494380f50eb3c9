"""Loading in two steps: a version is fetched beside the one in use, then it is swapped in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TypeAlias

from redrb.errors import ConfigError, WeightMismatch
from redrb.weights.reading.catalogue import Catalogue, Pin
from redrb.weights.reading.load_target import LoadTarget
from redrb.weights.reading.state_copies import FetchedVersion, StateCopy
from redrb.weights.tensors.fitting import target_shards
from redrb.weights.tensors.names import Target
from redrb.weights.wire.manifest import WeightVersion

Fetched: TypeAlias = "tuple[FetchedVersion | None, ExitStack]"
"""What came, None where nothing is newer, and what lets go of it."""


@dataclass(frozen=True, slots=True, eq=False)
class SubscriberAccess:
    """What a subscriber lends to who fetches ahead for it.

    Attributes:
        catalogue: Its versions.
        copy: Where they are fetched to.
        lock: Held while tensors change.
        reading: Held while the copy changes, and while it is loaded.
        version: Returns the version that was loaded last, None before the first.
        loaded: Told which version the target has; None: a mixture.
        wait: `wait(version, seconds)` returns the newest version if it is larger, after waiting for
            one so long at most.
        trying: Runs an attempt to fetch into the copy, and again where that may help.
        plan: Checks what is to be loaded, and returns what does it, under the lock.
        ended: Called when nothing is fetched ahead any more.
    """

    catalogue: Catalogue
    copy: StateCopy
    lock: AbstractContextManager[object]
    reading: threading.Lock
    version: Callable[[], int | None]
    loaded: Callable[[int | None], None]
    wait: Callable[[int, float], WeightVersion | None]
    trying: Callable[[StateCopy, Callable[[Pin], Fetched]], Fetched]
    plan: Callable[[Target, LoadTarget, FetchedVersion], Callable[[], None]]
    ended: Callable[[], None]


class PreparedLoad:
    """The newest version for one target: `fetch` brings it beside, `load` puts it in.

    Each may be called by a thread of its own; `load` never waits for `fetch`.

    Attributes:
        lent: Of the subscriber.
        ready: The version that `load` would load, None where there is nothing to load.
    """

    def __init__(self, lent: SubscriberAccess, target: Target, wanted: LoadTarget) -> None:
        self.lent = lent
        self._target = target
        self._wanted = wanted
        self._fetched: FetchedVersion | None = None
        self._held = ExitStack()
        self._closed = False
        self.ready: int | None = None

    @property
    def version(self) -> int | None:
        """The version that was loaded last; None before the first, and where loading broke off."""
        return self.lent.version()

    @property
    def newest(self) -> int:
        """The newest version that is ready or loaded, 0 where none is."""
        return self.ready or self.version or 0

    def fetch(self) -> bool:
        """Fetch the newest version, unless it is ready or loaded; returns whether it was fetched.

        What was ready is not any more as soon as a newer one is on its way.

        Raises:
            WeightMismatch: Names, shapes or dtypes differ.
            WeightError, DecodeError, StoreUnavailable: As `WeightSubscriber.poll` does.
        """
        with self.lent.reading:
            if self._closed or self.lent.catalogue.other_than(self.newest) is None:
                return False
            self._let_go()
            current, held = self.lent.trying(self.lent.copy, self._attempt)
            if current is None:  # what was newer is gone
                return False
            self._fetched, self._held = current, held
            self.ready = current.described.version
            return True

    def load(self) -> int | None:
        """Load what is ready; the caller holds the lock of the tensors.

        All is checked before the first tensor changes. When loading breaks off nevertheless, the
        version is None, and the next call loads all of it again.

        Returns:
            The version, or None: nothing is ready, or just at this moment the copy changes.

        Raises:
            WeightMismatch: It does not fit the target; nothing was loaded.
        """
        if not self.lent.reading.acquire(blocking=False):
            return None
        try:
            if self._fetched is None:
                return None
            self._load(self._fetched)
            self._let_go()
            return self.version
        except WeightMismatch:
            self._let_go()
            raise
        finally:
            self.lent.reading.release()

    def close(self) -> None:
        """Let go of what was fetched; waits until nothing is on its way."""
        with self.lent.reading:
            if not self._closed:
                self._closed = True
                self._let_go()
                self.lent.ended()

    def _attempt(self, pin: Pin) -> Fetched:
        with ExitStack() as scope:
            used = self.version or 0
            context = self.lent.copy.current(pin, used=used, needed=self._wanted.chunks)
            return scope.enter_context(context), scope.pop_all()

    def _load(self, current: FetchedVersion) -> None:
        # tensors are looked up each time: a model may have got others meanwhile
        wanted = LoadTarget(target_shards(self._target), self._wanted.strict)
        state = current.state
        if state is not None and not wanted.chunks(state.layout) <= self._wanted.chunks(
            state.layout
        ):
            raise WeightMismatch(
                f"weights {self.lent.catalogue.name!r}: the model has got other tensors since "
                "versions are fetched ahead for it: begin anew with it."
            )
        load = self.lent.plan(self._target, wanted, current)
        try:
            load()
        except BaseException:
            self.lent.loaded(None)
            raise
        self.lent.loaded(current.described.version)

    def _let_go(self) -> None:
        self.ready = self._fetched = None
        self._held.close()


def taken(name: str) -> ConfigError:
    """Return what is raised where two want to use one subscriber's copy."""
    return ConfigError(
        f"the versions of weights {name!r} are fetched ahead by a standby of this subscriber: call "
        "its swap(), or close it before."
    )
