"""Versions fetched beside the one in use: a thread fetches them, a swap loads them."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from redrb.connection.deadline import Deadline, here
from redrb.connection.outage import Outage
from redrb.connection.retries import insist
from redrb.connection.stop import Stop
from redrb.errors import (
    DecodeError,
    RedrbError,
    StoreClosed,
    StoreUnavailable,
    WeightCorrupt,
    WeightMismatch,
    WeightTimeout,
)
from redrb.scopes import Closing
from redrb.weights.reading.loading import TargetLoader
from redrb.weights.reading.missing import announced_wait
from redrb.weights.reading.state_copies import FetchedVersion
from redrb.weights.reading.targets import LoadTarget
from redrb.weights.wire.manifest import WeightVersion

_WAIT_S = 0.5
"""Longest wait for a new version; then the thread checks whether it is to end."""

_MISSED_S = 60.0
"""How long fetched weights wait for the swap that missed them."""

_LOOK_S = 1.0
"""Longest wait of a caller for the thread; then it looks whether the thread has ended."""

Move: TypeAlias = Literal["fetch", "load", "nothing"]
"""What a reader of weights does next."""


@dataclass(frozen=True, slots=True)
class Held:
    """The versions that a reader of weights has.

    Attributes:
        loaded: The version in use; None: there is none, or it is a mixture.
        ready: The version that was fetched and can be loaded; None: there is none.
        missed: Whether a load came too early, while a fetch was under way.
    """

    loaded: WeightVersion | None = None
    ready: WeightVersion | None = None
    missed: bool = False


def next_move(newest: WeightVersion | None, held: Held) -> Move:
    """Return what a reader does next; `newest` is the newest published version, if it is known.

    Each version but the one that is held is fetched, also one of a smaller number, and one of the
    same number that was created at another time: a server that has lost its data counts versions
    from 1 again. A version whose load came too early is loaded before a newer one is fetched.
    Without that, a reader that fetches all the time, because versions come faster than it can fetch
    them, would never have a version ready.
    """
    has = held.ready or held.loaded
    is_other = newest is not None and (
        has is None or (newest.version, newest.created_s) != (has.version, has.created_s)
    )
    if is_other and not (held.ready and held.missed):
        return "fetch"
    return "load" if held.ready else "nothing"


class PreparedLoad:
    """The newest version for one target: `fetch` fetches it, `load` loads it.

    Two threads may call them; `load` never waits for `fetch`. Until `close` is called, calls that
    load with the same subscriber raise `ConfigError`.

    Attributes:
        missed: Whether a load came while a fetch was under way: until the fetched version is
            loaded, `fetch` fetches no newer one.
    """

    def __init__(self, loader: TargetLoader, selection: LoadTarget) -> None:
        with loader.used_for(selection):
            loader.in_use = True
        self._loader = loader
        self._selection = selection
        self._fetched: FetchedVersion | None = None
        self._closed = False
        self.missed = False

    @property
    def held(self) -> Held:
        """The versions that are loaded and ready."""
        used = self._loader.catalogue.used if self._loader.version is not None else None
        fetched = self._fetched
        return Held(used, None if fetched is None else fetched.described, self.missed)

    @property
    def ready(self) -> int | None:
        """The version that `load` would load, or None."""
        fetched = self._fetched
        return None if fetched is None else fetched.described.version

    @property
    def version(self) -> int | None:
        """The version that was loaded last; None before the first, and after loading broke off."""
        return self._loader.version

    @property
    def newest(self) -> int:
        """The newest version that is ready or loaded, 0 if there is none."""
        return self.ready or self.version or 0

    @property
    def fetching(self) -> bool:
        """Whether a fetch is under way."""
        return self._loader.reading.locked()

    def fetch(self) -> bool:
        """Fetch the newest version, unless it is ready or loaded; returns whether it was fetched.

        A fetch drops the version that was ready before.
        """
        loader = self._loader
        with loader.reading:
            if self._closed or next_move(loader.catalogue.newer_than(0), self.held) != "fetch":
                return False
            self._fetched = None
            # None if the newer version was deleted meanwhile
            self._fetched = loader.fetch(self._selection)
            return self._fetched is not None

    def load(self) -> int | None:
        """Load the fetched version; the caller holds the lock of the tensors.

        All of it is checked before the first tensor changes. If loading breaks off nevertheless,
        `version` is None and the next call loads all of it again.

        Returns:
            The version, or None if no version is ready or a fetch is under way.
        """
        if not self._loader.reading.acquire(blocking=False):
            self.missed = True
            return None
        try:
            if self._fetched is None:
                return None
            # looked up each time, since the model may have new tensors
            selection = LoadTarget.of(self._selection.target, self._selection.strict)
            state = self._fetched.state
            if state is not None and not selection.chunks(state.layout) <= self._selection.chunks(
                state.layout
            ):
                raise WeightMismatch(
                    f"weights {self._loader.catalogue.name!r}: the model has other tensors than "
                    "when this standby was created: close it and create a new one."
                )
            self._loader.plan(selection, self._fetched)()
            self._fetched, self.missed = None, False
            return self.version
        except WeightMismatch:
            self._fetched = None
            raise
        finally:
            self._loader.reading.release()

    def close(self) -> None:
        """Drop the fetched version and release the subscriber; waits for a fetch under way."""
        with self._loader.reading:
            if not self._closed:
                self._closed = True
                self._fetched = None
                self._loader.in_use = False


class BackgroundFetch(ABC):
    """A thread that waits for versions and fetches them, and the swap that loads them.

    The thread and the swaps never wait for each other. If a swap finds nothing ready while a fetch
    is under way, the thread keeps the fetched version until the next swap has loaded it.
    """

    def __init__(self, thread_name: str, outage: Outage) -> None:
        self._thread_name = thread_name
        self._thread: threading.Thread | None = None
        self._over = Stop(0.0)
        self._outage = outage
        self._prepared: PreparedLoad | None = None
        self._changed = threading.Condition()  # a version was fetched or loaded, or failed
        self._changes = 0
        self._error: Exception | None = None  # for the next call of `_raise_error`
        self._reported = ""  # the last error, which is not raised twice in a row

    @abstractmethod
    def _fetch_next(self, wait_s: float) -> bool:
        """Wait at most `wait_s` seconds for a version, and fetch it; returns whether one came."""

    @abstractmethod
    def swap(self) -> int | None:
        """Load the fetched version, if there is one; returns the version that the model has."""

    def _start(self) -> None:
        self._over, self._reported = Stop(0.0), ""
        self._thread = threading.Thread(
            target=self._run, args=(self._over,), name=self._thread_name, daemon=True
        )
        self._thread.start()

    def _end(self) -> None:
        self._over.ask()
        self._notify()
        if self._thread is not None:
            self._over.end(self._thread, here().left_s)

    def _notify(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def _load(self, prepared: PreparedLoad) -> None:
        """Load the fetched version, unless a fetch is under way; the lock of the model is held."""
        prepared.load()

    def _swap_in(self, lock: AbstractContextManager[object]) -> None:
        """Load the fetched version under `lock`, if one is ready; never waits for Redis."""
        prepared = self._prepared
        if prepared is None:
            return
        ready = prepared.ready
        if ready is not None:
            try:
                with lock:
                    self._load(prepared)
            finally:
                if prepared.ready is None:
                    self._notify()
        elif prepared.fetching:
            prepared.missed = True

    def _raise_error(self) -> None:
        if self._error is None:
            return
        with self._changed:
            error = self._error
            if not isinstance(error, StoreClosed):
                self._error = None
        if error is not None:  # another thread may have been faster
            raise error

    def _swap_until(self, least: int, timeout: float | None) -> int | None:
        """Swap until the model has version `least`, or an error came up, or the time is over."""
        ends = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            seen, version, left = self._changes, self.swap(), ends - time.monotonic()
            if (version or 0) >= least or self._error is not None or self._over or left <= 0:
                return version
            with self._changed:
                if seen == self._changes:
                    self._changed.wait(min(left, _LOOK_S))

    def _run(self, over: Stop) -> None:
        with Deadline(stop=over, budget=over):
            while not over:
                try:
                    fetched = insist(
                        partial(self._fetch_next, _WAIT_S),
                        over,
                        self._failed,
                        errors=Exception,
                        unless=StoreClosed,
                    )
                except Exception as error:  # noqa: BLE001 (a swap or a check raises it)
                    if not (over and isinstance(error, RedrbError)):
                        self._failed(error)
                    break
                if fetched:
                    self._reported = ""
                    self._notify()
                self._outage.over()
                self._await_swap(over)

    def _await_swap(self, over: Stop) -> None:
        """Keep the fetched version for a swap that came too early."""
        prepared = self._prepared
        if prepared is not None and prepared.missed:
            with self._changed:
                self._changed.wait_for(lambda: over or prepared.ready is None, _MISSED_S)
            prepared.missed = False

    def _failed(self, error: Exception) -> None:
        """Note an error of the thread for a swap; while Redis is away nothing is raised."""
        text = f"{type(error).__name__} {error}"
        if isinstance(error, StoreUnavailable):
            self._outage.failed(error)
        elif text != self._reported:
            with self._changed:
                self._reported, self._error = text, error
                self._notify()


class WeightStandby(BackgroundFetch, Closing):
    """Keeps the newest version ready beside the model; `WeightSubscriber.standby` creates it.

    A thread waits for new versions and fetches them into the subscriber's copy while generation
    goes on. Generation calls `swap` where the model may change: between tokens, as PipelineRL does
    (Piché et al. 2025, arXiv:2509.19128), or between batches. Generation decides whether it keeps
    or drops values that it computed with earlier weights, such as cached keys and values.

    Examples:
        >>> with subscriber.standby(model) as standby:
        ...     standby.wait(timeout=60)
        ...     done = redrb.algorithms.generate(model, prompts, before_token=standby.swap)
        ...     done.token_versions  # the weights that made each token
    """

    _prepared: PreparedLoad

    def __init__(self, loader: TargetLoader, selection: LoadTarget) -> None:
        name = loader.catalogue.name
        super().__init__("redrb-standby", Outage(f"weights {name!r} cannot be followed"))
        self._prepared = PreparedLoad(loader, selection)
        self._loader = loader
        self._name = name
        self._seen: int | None = None
        self._refused = 0  # the newest version, if it cannot be fetched
        self._start()

    def __repr__(self) -> str:
        return f"<redrb.WeightStandby {self._name!r} at version {self.version}>"

    @property
    def version(self) -> int | None:
        """The model's version; None before the first, and after loading broke off."""
        return self._prepared.version

    def swap(self, *, locked: bool = False) -> int | None:
        """Load the fetched version under the subscriber's lock; costs nothing if there is none.

        It waits neither for Redis nor for a fetch that is under way. After a call that came during
        a fetch, the thread fetches nothing newer until a later call has loaded that version.

        Args:
            locked: The caller holds the subscriber's lock, which is not re-entrant.

        Returns:
            The version that the model has from now on; None before the first.

        Raises:
            WeightMismatch, DecodeError, WeightError, StoreError: A version could not be fetched or
                does not fit. Each error is raised once; the model keeps its weights, and later
                versions are followed. While Redis is away nothing is raised.
            StoreClosed: The client was closed, so that no version can be fetched any more.
        """
        self._raise_error()
        self._swap_in(nullcontext() if locked else self._loader.lock)
        return self._prepared.version

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the first version and load it; returns at once if the model has a version.

        Raises:
            WeightTimeout: No version came in time.
            WeightMismatch, DecodeError, WeightError, StoreError: As `swap` does.
        """
        started = time.monotonic()
        version = self.swap()
        if version is None:
            with announced_wait(self._loader.catalogue.everywhere):
                version = self._swap_until(1, timeout)
        if version is None:
            self._raise_error()
            waited_s = time.monotonic() - started
            raise WeightTimeout(name=self._name, newer_than=0, newest=self._seen, waited_s=waited_s)
        return version

    def close(self) -> None:
        """End the thread, and the fetch that is under way; the model keeps its weights.

        Where the thread checks or copies a version for more than two seconds it goes on in the
        background; the subscriber can be used again when it has ended.
        """
        self._end()

    def _fetch_next(self, wait_s: float) -> bool:
        catalogue = self._loader.catalogue
        newest = catalogue.wait_once(self._refused or self._prepared.newest, wait_s)
        if newest is None:
            return False
        self._seen = newest.version
        try:
            self._prepared.fetch()
        except (WeightMismatch, WeightCorrupt, DecodeError):
            self._refused = newest.version
            raise
        self._refused = 0
        return True

    def _run(self, over: Stop) -> None:
        super()._run(over)
        self._prepared.close()
        self._notify()
