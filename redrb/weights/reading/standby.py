"""Weights that change in mid-generation: fetched beside it by a thread, swapped between tokens."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import nullcontext
from typing import Self

from redrb.connection.stopping import Stop, stoppable
from redrb.errors import (
    DecodeError,
    RedrbError,
    StoreClosed,
    StoreUnavailable,
    WeightMismatch,
    WeightTimeout,
)
from redrb.weights.reading.handover import Handover
from redrb.weights.reading.prepared_load import PreparedLoad

_log = logging.getLogger("redrb")

_SLICE_S = 1.0
"""Longest wait for a version before it is looked whether this is closed."""

_PAUSE_S = 0.5
"""Pause after an error."""

_END_S = 2.0


class WeightStandby:
    """Keeps the newest version ready beside the model; made by `WeightSubscriber.standby`.

    A thread waits for new versions and fetches them into the subscriber's copy, with generation
    going on. Generation calls `swap` where the model may change: between tokens, as PipelineRL does
    (Piché et al. 2025, arXiv:2509.19128), or between batches. What was computed with the weights
    before, such as keys and values in a cache, is generation's to keep or drop.

    Example:
        >>> with subscriber.standby(model) as standby:
        ...     standby.wait(timeout=60)
        ...     done = redrb.algorithms.generate(model, prompts, before_token=standby.swap)
        ...     done.token_versions  # which weights made each token
    """

    def __init__(self, ahead: PreparedLoad) -> None:
        self._ahead = ahead
        self._lent = ahead.lent
        self._name = ahead.lent.catalogue.name
        self._stop = Stop()
        self._news = threading.Event()  # something is ready, or went wrong
        self._handover = Handover()
        self._busy = False
        self._error: Exception | None = None
        self._closed: StoreClosed | None = None
        self._told = ""
        self._seen: int | None = None
        self._failed = 0  # the newest version, where it could not be fetched
        self._thread = threading.Thread(target=self._run, name="redrb-standby", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<redrb.WeightStandby {self._name!r} at version {self.version}>"

    @property
    def version(self) -> int | None:
        """The version that the model has; None before the first, and when loading broke off."""
        return self._ahead.version

    def swap(self, *, locked: bool = False) -> int | None:
        """Load what is ready, under the subscriber's lock; where nothing is, cost nothing.

        It waits neither for Redis nor for a version that is being fetched: that one is loaded by a
        later call, and after a call that came too early nothing newer is fetched before it was.

        Args:
            locked: The caller holds the subscriber's lock, which is no re-entrant one.

        Returns:
            The version that the model has from now on; None before the first.

        Raises:
            WeightMismatch, DecodeError, WeightError, StoreError: A version could not be fetched or
                does not fit, which is said once; the model keeps its weights, and later versions
                are followed. A Redis that is away is waited for instead.
            StoreClosed: The client was closed: nothing is followed any more.
        """
        if self._closed is not None:
            raise self._closed
        if self._error is not None:
            error, self._error = self._error, None
            if error is not None:  # another thread may have been faster
                raise error
        if self._ahead.ready is None:
            if self._busy:
                self._handover.missed()
            return self._ahead.version
        with nullcontext() if locked else self._lent.lock:
            if self._ahead.load() is not None:
                self._handover.taken()
            elif self._busy:
                self._handover.missed()
            return self._ahead.version

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the first version, and load it; returns at once where the model has one.

        Raises:
            WeightTimeout: None came in time.
            WeightMismatch, DecodeError, WeightError, StoreError: As `swap` does.
        """
        started = time.monotonic()
        while True:
            self._news.clear()
            version = self.swap()
            if version is not None:
                return version
            waited_s = time.monotonic() - started
            if self._stop.asked or (timeout is not None and waited_s >= timeout):
                raise WeightTimeout(
                    name=self._name, newer_than=0, newest=self._seen, waited_s=waited_s
                )
            left = _SLICE_S if timeout is None else min(_SLICE_S, timeout - waited_s)
            self._news.wait(left)

    def close(self) -> None:
        """End the thread; the model keeps what was swapped in.

        A fetch under way that does not end within two seconds goes on in the background, and the
        subscriber is free when it is done.
        """
        self._stop.ask()
        self._handover.taken()
        self._news.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        away = False
        with stoppable(self._stop):
            while not self._stop.asked:
                try:
                    self._follow()
                    away = False
                except StoreClosed as error:
                    self._closed = error
                    break
                except StoreUnavailable as error:
                    if not (away or self._stop.asked):
                        _log.warning("weights %r are not followed: %s", self._name, error)
                    away = True
                    self._stop.wait(_PAUSE_S)
                except Exception as error:  # noqa: BLE001 (it is raised by the next swap)
                    self._fail(error)
                    self._stop.wait(_PAUSE_S)
            self._ahead.close()
            self._news.set()

    def _follow(self) -> None:
        """Wait for a version, and fetch it."""
        newest = self._lent.wait(self._failed or self._ahead.newest, _SLICE_S)
        if newest is None:
            return
        self._seen = newest.version
        self._busy = True
        try:
            self._ahead.fetch()
        except StoreUnavailable:
            raise
        except (WeightMismatch, DecodeError):
            self._failed = newest.version  # it stays as it is
            raise
        finally:
            self._busy = False
        self._told, self._failed = "", 0
        self._news.set()
        self._handover.give_way(lambda: self._ahead.ready is not None, self._stop)

    def _fail(self, error: Exception) -> None:
        """Keep an error for the next swap, but what it has said already."""
        told = f"{type(error).__name__} {error}"
        if self._stop.asked and isinstance(error, RedrbError):
            return
        if told != self._told:
            self._told, self._error = told, error
            self._news.set()
