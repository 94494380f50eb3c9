"""Versions fetched beside the one in use: a thread fetches them, a swap loads them."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, Self

from redrb.connection.deadline import Deadline
from redrb.connection.outage import Outage
from redrb.connection.stop import Stop
from redrb.errors import (
    DecodeError,
    RedrbError,
    StoreClosed,
    StoreUnavailable,
    WeightMismatch,
    WeightTimeout,
)
from redrb.weights.reading.catalogue import Pin, fetching
from redrb.weights.reading.loading import TargetLoader
from redrb.weights.reading.state_copies import FetchedVersion
from redrb.weights.reading.targets import LoadTarget

_WAIT_S = 0.5
"""Longest wait for a new version; then the thread checks whether it is to end."""

_PAUSE_S = 0.5
"""Pause after an error."""

_END_S = 2.0
"""How long `_end` waits for the thread; a longer fetch ends in the background."""

_MISSED_S = 60.0
"""How long fetched weights wait for the swap that missed them."""

_FIRST_S = 1.0
"""Longest wait for the first version; then `wait` checks whether the standby was closed."""


class FetchedVersions(Protocol):
    """Versions that one thread fetches and another one loads."""

    @property
    def ready(self) -> object:
        """True if a fetched version can be loaded."""

    @property
    def fetching(self) -> bool:
        """Whether a fetch is under way."""

    def load(self) -> object:
        """Load the fetched version, unless a fetch is under way; returns whether it was loaded."""


class BackgroundFetch(ABC):
    """A thread that waits for versions and fetches them, and the swap that loads them.

    The thread and the swaps never wait for each other. If a swap finds nothing ready while a fetch
    is under way, the thread keeps the fetched version until the next swap has loaded it. Without
    that, a thread that fetches all the time, because versions come faster than it can fetch them,
    would never have a version ready.
    """

    def __init__(self, thread_name: str, source: FetchedVersions) -> None:
        self._thread_name = thread_name
        self._thread: threading.Thread | None = None
        self._source = source
        self._stop = Stop()
        self._loaded = threading.Event()
        self._missed = False

    @abstractmethod
    def _fetch_next(self, wait_s: float) -> None:
        """Wait at most `wait_s` seconds for a version, and fetch it."""

    @abstractmethod
    def _failed(self, error: Exception) -> None:
        """Keep, log or drop an error of the thread."""

    def _ended(self) -> None:  # noqa: B027 (most have nothing to release)
        """Release resources at the end of the thread."""

    def _start(self) -> None:
        self._stop = Stop()
        self._thread = threading.Thread(
            target=self._run, args=(self._stop,), name=self._thread_name, daemon=True
        )
        self._thread.start()

    def _end(self) -> None:
        self._stop.ask()
        self._loaded.set()
        if self._thread is not None:
            with Deadline(at_most=_END_S) as deadline:
                self._thread.join(deadline.left_s)

    def _swap_in(self, lock: AbstractContextManager[object]) -> None:
        """Load the fetched version under `lock`, if one is ready; never waits for Redis."""
        if self._source.ready:
            with lock:
                if self._source.load():
                    self._loaded.set()
                else:
                    self._missed = True
        elif self._source.fetching:
            self._missed = True

    def _run(self, stop: Stop) -> None:
        with Deadline(stop=stop):
            while not stop:
                try:
                    self._fetch_next(_WAIT_S)
                    missed, self._missed = self._missed, False
                    deadline = time.monotonic() + _MISSED_S
                    while missed and not stop and (left := deadline - time.monotonic()) > 0:
                        self._loaded.clear()
                        if stop or not self._source.ready:
                            break
                        self._loaded.wait(left)
                except Exception as error:  # noqa: BLE001 (a swap or a check raises it)
                    if not (stop and isinstance(error, RedrbError)):
                        self._failed(error)
                    if isinstance(error, StoreClosed):
                        break
                    stop.wait(_PAUSE_S)
            self._ended()


class PreparedLoad:
    """The newest version for one target: `fetch` fetches it, `load` loads it.

    Two threads may call them; `load` never waits for `fetch`. Until `close` is called, calls that
    load with the same subscriber raise `ConfigError`.

    Attributes:
        ready: The version that `load` would load, or None.
    """

    def __init__(self, loader: TargetLoader, selection: LoadTarget) -> None:
        with loader.used_for(selection):
            loader.in_use = True
        self._loader = loader
        self._selection = selection
        self._fetched: FetchedVersion | None = None
        self._closed = False
        self.ready: int | None = None

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

        def attempt(pin: Pin) -> FetchedVersion | None:
            used, needed = self.version or 0, self._selection.chunks
            return loader.copy.fetch_newest(pin, used=used, needed=needed)

        with loader.reading:
            if self._closed or loader.catalogue.other_than(self.newest) is None:
                return False
            self._drop()
            fetched = fetching(loader.catalogue, loader.copy.forget, attempt)
            if fetched is None:  # the newer version was deleted meanwhile
                return False
            self._fetched = fetched
            self.ready = fetched.described.version
            return True

    def load(self) -> int | None:
        """Load the fetched version; the caller holds the lock of the tensors.

        All of it is checked before the first tensor changes. If loading breaks off nevertheless,
        `version` is None and the next call loads all of it again.

        Returns:
            The version, or None if no version is ready or a fetch is under way.
        """
        if not self._loader.reading.acquire(blocking=False):
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
            self._drop()
            return self.version
        except WeightMismatch:
            self._drop()
            raise
        finally:
            self._loader.reading.release()

    def close(self) -> None:
        """Drop the fetched version and release the subscriber; waits for a fetch under way."""
        with self._loader.reading:
            if not self._closed:
                self._closed = True
                self._drop()
                self._loader.in_use = False

    def _drop(self) -> None:
        self.ready = self._fetched = None


class WeightStandby(BackgroundFetch):
    """Keeps the newest version ready beside the model; `WeightSubscriber.standby` creates it.

    A thread waits for new versions and fetches them into the subscriber's copy while generation
    goes on. Generation calls `swap` where the model may change: between tokens, as PipelineRL does
    (Piché et al. 2025, arXiv:2509.19128), or between batches. Generation decides whether it keeps
    or drops values that it computed with earlier weights, such as cached keys and values.

    Example:
        >>> with subscriber.standby(model) as standby:
        ...     standby.wait(timeout=60)
        ...     done = redrb.algorithms.generate(model, prompts, before_token=standby.swap)
        ...     done.token_versions  # the weights that made each token
    """

    def __init__(self, loader: TargetLoader, selection: LoadTarget) -> None:
        self._prepared = PreparedLoad(loader, selection)
        super().__init__("redrb-standby", self._prepared)
        self._loader = loader
        self._name = loader.catalogue.name
        self._news = threading.Event()  # a version is ready, or an error came up
        self._outage = Outage(f"weights {self._name!r} cannot be followed")
        self._error: Exception | None = None
        self._closed: StoreClosed | None = None
        self._reported = ""  # the last error, which is not raised twice in a row
        self._seen: int | None = None
        self._refused = 0  # the newest version, if it can never be fetched
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

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
        if self._closed is not None:
            raise self._closed
        if self._error is not None:
            error, self._error = self._error, None
            if error is not None:  # another thread may have been faster
                raise error
        self._swap_in(nullcontext() if locked else self._loader.lock)
        return self._prepared.version

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the first version and load it; returns at once if the model has a version.

        Raises:
            WeightTimeout: No version came in time.
            WeightMismatch, DecodeError, WeightError, StoreError: As `swap` does.
        """
        started = time.monotonic()
        while True:
            self._news.clear()
            version = self.swap()
            if version is not None:
                return version
            waited_s = time.monotonic() - started
            if self._stop or (timeout is not None and waited_s >= timeout):
                raise WeightTimeout(
                    name=self._name, newer_than=0, newest=self._seen, waited_s=waited_s
                )
            left = _FIRST_S if timeout is None else min(_FIRST_S, timeout - waited_s)
            self._news.wait(left)

    def close(self) -> None:
        """End the thread; the model keeps its weights.

        A fetch that does not end within two seconds goes on in the background; the subscriber can
        be used again when it has ended.
        """
        self._stop.ask()
        self._news.set()
        self._end()

    def _fetch_next(self, wait_s: float) -> None:
        catalogue = self._loader.catalogue
        newest = catalogue.wait_once(self._refused or self._prepared.newest, wait_s)
        if newest is not None:
            self._seen = newest.version
            try:
                self._prepared.fetch()
            except (WeightMismatch, DecodeError):
                self._refused = newest.version
                raise
            self._reported, self._refused = "", 0
            self._news.set()
        self._outage.over()

    def _failed(self, error: Exception) -> None:
        if isinstance(error, StoreClosed):
            self._closed = error
        elif isinstance(error, StoreUnavailable):
            self._outage.failed(error)
        elif self._reported != (text := f"{type(error).__name__} {error}"):
            self._reported, self._error = text, error
            self._news.set()

    def _ended(self) -> None:
        self._prepared.close()
        self._news.set()
