"""`WeightStandby`: keeps the newest version of a `WeightSubscriber` ready to be swapped in."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from typing import Self

from redrb.connection.outage import Outage
from redrb.errors import (
    DecodeError,
    StoreClosed,
    StoreUnavailable,
    WeightMismatch,
    WeightTimeout,
)
from redrb.weights.reading.background_fetch import BackgroundFetch
from redrb.weights.reading.prepared_load import PreparedLoad

_WAIT_S = 1.0
"""Longest wait for the first version; then `wait` checks whether the standby was closed."""


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

    def __init__(self, prepared: PreparedLoad) -> None:
        super().__init__("redrb-standby")
        self._prepared = prepared
        self._access = prepared.access
        self._name = prepared.access.catalogue.name
        self._news = threading.Event()  # a version is ready, or an error came up
        self._busy = False
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
        if self._busy or self._prepared.ready is not None:
            self._swap_in(nullcontext() if locked else self._access.lock)
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
            left = _WAIT_S if timeout is None else min(_WAIT_S, timeout - waited_s)
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
        newest = self._access.wait(self._refused or self._prepared.newest, wait_s)
        if newest is None:
            self._outage.over()
            return
        self._seen = newest.version
        self._busy = True
        try:
            self._prepared.fetch()
        except (WeightMismatch, DecodeError):
            self._refused = newest.version
            raise
        finally:
            self._busy = False
        self._reported, self._refused = "", 0
        self._outage.over()
        self._news.set()

    @property
    def _is_ready(self) -> bool:
        return self._prepared.ready is not None

    @property
    def _is_fetching(self) -> bool:
        return self._busy

    def _load(self) -> bool:
        return self._prepared.load() is not None

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
