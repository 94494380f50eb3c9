"""Weights of a maker's models: announced by a trainer, fetched, loaded as a whole under a lock."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from redrb.connection import Client
from redrb.connection.deadline import Deadline, here
from redrb.connection.outage import Outage
from redrb.connection.stop import Stop
from redrb.errors import DecodeError, StoreUnavailable, WeightError, WeightMismatch, WeightTimeout
from redrb.keys import WeightKeys, maker_key, trainer_key
from redrb.runtime.announcements import Agreement, Announcement, AnnouncementReader
from redrb.runtime.model_updates import ModelUpdates
from redrb.weights import WeightSubscriber
from redrb.weights.reading.missing import MissingWeights
from redrb.weights.reading.standby import BackgroundFetch, PreparedLoad

_log = logging.getLogger("redrb")

_WAIT_S = 0.5
"""Longest wait for an announcement; then the caller looks whether it is to end."""

FETCH_S = 5.0
"""Longest wait for weights that are fetched beside generation, once there is a right to begin."""

_ONE_ATTEMPT = Stop()
_ONE_ATTEMPT.ask()


class MakerWeights(BackgroundFetch):
    """Keeps the models of a maker at the newest announced weights, also while Redis comes and goes.

    The maker follows the trainers that name it. Until a trainer does, it follows a trainer that it
    chose itself, so that makers of any name may join a run. Weights are fetched beside the models
    and loaded as a whole: between two batches, or with `in_flight`, where a thread fetches them,
    also between two tokens.

    Attributes:
        client: Connection to Redis.
        namespace: Namespace of the trainers.
        updates: The models with their lock.
        version: Version of the weights in the models; None before the first.
        initialised: Whether the models may be used.
        fetch_s: Seconds that calls of `refresh` have taken.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        maker: str,
        models: Mapping[str, nn.Module | None],
        stop: Stop,
        *,
        follow: str,
        first_timeout: float = 600.0,
        in_flight: bool = False,
        wait_for_first: bool = True,
        agree: Mapping[str, str] | None = None,
    ) -> None:
        """Follow the trainers that name `maker`, and `follow` until one does; nothing is loaded.

        Args:
            first_timeout: Seconds to wait for the first weights.
            agree: Text of each setting in which the trainer must agree with the maker; weights of
                others are refused.
        """
        super().__init__("redrb-in-flight", self)
        self.client, self.namespace = client, namespace
        self.updates = ModelUpdates(models)
        self.version: int | None = None
        self.initialised = not wait_for_first
        self.fetch_s = 0.0
        self._maker, self._maker_stop = maker, stop
        self._first_timeout, self._in_flight = first_timeout, in_flight
        self._to_maker = AnnouncementReader(client, maker_key(namespace, maker))
        self._by_chosen: AnnouncementReader | None = AnnouncementReader(
            client, trainer_key(namespace, follow)
        )
        self._agreement = Agreement(maker, agree or {})
        self._trainer = follow
        self._announced = 0
        self._pending: Announcement | None = None  # not fetched yet, because Redis was away
        self._prepared: PreparedLoad | None = None
        self._outage = Outage(f"maker {maker!r} goes on with the weights it has")
        self._error: Exception | None = None  # of the thread, or of a swap
        self._fetched = threading.Event()  # the thread has fetched an update, or failed

    @property
    def name(self) -> str:
        """Name of the trainer whose weights are followed."""
        return self._trainer

    @property
    def ready(self) -> bool:
        """Whether fetched weights can be loaded."""
        return self._prepared is not None and self._prepared.ready is not None

    @property
    def fetching(self) -> bool:
        """Whether a fetch is under way."""
        return self._prepared is not None and self._prepared.fetching

    async def update(self) -> None:
        """Wait for the first weights as `wait_until_initialised` does, in a thread."""
        await asyncio.to_thread(self.wait_until_initialised)

    async def follow(self) -> None:
        """With in-flight updates, fetch weights beside sampling until the task is cancelled."""
        with self.prefetching():
            await asyncio.Event().wait()

    @contextmanager
    def prefetching(self) -> Iterator[None]:
        """With in-flight updates, fetch them in a thread while this block runs."""
        if not self._in_flight:
            yield
            return
        self._start()
        try:
            yield
        finally:
            self._end()

    def wait_until_initialised(self) -> bool:
        """Wait for the first weights; False if the maker was asked to end before they came.

        The wait also goes on while Redis is away and while announced weights are gone.

        Raises:
            WeightTimeout: No weights came in time.
            WeightMismatch: They do not fit the models.
            ConfigError: The trainer has other settings than the maker.
            DecodeError: An announcement or the weights are damaged.
        """
        started = time.monotonic()
        missing = MissingWeights(self.client, WeightKeys.of(self.namespace, self.name), self.name)
        cause: Exception | None = None
        outage = Outage(f"maker {self._maker!r} still waits for weights")
        with Deadline(stop=self._maker_stop):
            while not (self.initialised or self._maker_stop):
                left = started + self._first_timeout - time.monotonic()
                if left <= 0:
                    raise self._agreement.pending or WeightTimeout(
                        name=f"of {self.name} for maker {self._maker}",
                        newer_than=0,
                        newest=None,
                        waited_s=time.monotonic() - started,
                    ) from cause
                try:
                    found = self.load_announced(min(left, _WAIT_S))
                    if not found and not self._agreement.pending:
                        missing.log()
                    outage.over()
                except WeightMismatch:
                    raise
                except (StoreUnavailable, WeightError) as error:
                    cause = error
                    outage.failed(error)
                    here().pause(min(left, _WAIT_S))
        return self.initialised

    def refresh(self, least: int | None = None) -> None:
        """Load the newest weights; while Redis is unreachable, keep the current ones.

        Args:
            least: Version for which a fetch beside generation is waited for, a few seconds.

        Raises:
            WeightError, DecodeError: The first weights cannot be loaded. Later ones are logged.
            ConfigError: A trainer with other settings than the maker's has started.
        """
        began = time.monotonic()
        try:
            if not self._in_flight:
                with Deadline(stop=_ONE_ATTEMPT if self._outage.lasts else self._maker_stop):
                    self.load_announced()
            else:
                error = self._error
                if error is not None:
                    if not isinstance(error, StoreUnavailable):  # of an outage until it is over
                        self._error = None
                    raise error
                if least is not None and self.version is not None:
                    self._await_version(least)
        except StoreUnavailable as outage:
            if not self._maker_stop:
                self._outage.failed(outage)
        except (WeightError, DecodeError) as wrong:
            if self.version is None:
                raise
            _log.error("maker %r keeps the weights it has: %s", self._maker, wrong)
        else:
            self._outage.over()
        finally:
            self.fetch_s += time.monotonic() - began

    def begin_batch(self) -> tuple[int | None, dict[str, Any]]:
        """Return the version that a batch begins with, and options for its experience maker.

        With in-flight updates, the option `before_token` loads new weights between two tokens.
        """
        if not self._in_flight:
            return self.version, {}
        return self.swap(), {"before_token": self.swap}

    def swap(self) -> int | None:
        """Load fetched weights, if there are any; return the version that the models have.

        The next `refresh` raises or logs an error.
        """
        try:
            self._swap_in(self.updates.held())
        except (WeightError, DecodeError) as error:
            self._error = error
        return self.version

    def load_announced(self, wait_s: float = 0.0) -> bool:
        """Fetch and load what was announced since the last call; returns whether anything was.

        Raises:
            WeightMismatch: The weights do not fit the models, which keep theirs.
            StoreUnavailable: Redis stayed away; the next call goes on.
            ConfigError: A trainer with other settings than the maker's has started.
        """
        found = self.prepare(wait_s)
        if self.ready:
            with self.updates.held():
                self.load()
        return found

    def prepare(self, wait_s: float) -> bool:
        """Wait so long for an announcement, and fetch its weights; returns whether there was one.

        Only one stream is waited on, since the two may be on different nodes of a cluster. While
        the chosen trainer's is waited on, the maker's own is read at the beginning of each call.
        """
        wait_s = 0.0 if self._pending else wait_s
        found = self._to_maker.newest()
        if found is not None:
            self._by_chosen = None
        elif self._by_chosen is not None:
            found = self._by_chosen.newest(wait_s)
        elif wait_s:
            found = self._to_maker.newest(wait_s)
        announcement = found if self._agreement.accepts(found) else self._pending
        if announcement is None:
            return found is not None
        self._pending = announcement
        try:
            self._fetch(announcement)
        except StoreUnavailable:
            raise
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        return True

    def load(self) -> bool:
        """Load the fetched weights, unless a fetch is under way; never waits for Redis.

        The caller holds the lock of the models.

        Raises:
            WeightMismatch: The weights do not fit the models.
        """
        prepared = self._prepared
        if prepared is None:
            return False
        try:
            loaded = prepared.load()
        except WeightMismatch:
            raise
        except BaseException:  # loading broke off: the models hold a mixture until it is repeated
            self.version = None
            raise
        if loaded is None:
            return False
        self.version = loaded
        self._note_initialised()
        self.updates.all_loaded()
        return True

    def _fetch(self, announcement: Announcement) -> None:
        prepared, trainer = self._prepared, announcement.trainer
        if prepared is None or trainer != self._trainer:
            subscriber = WeightSubscriber(
                self.client, trainer, namespace=self.namespace, lock=self.updates.lock
            )
            prepared = subscriber.prepared_load(self.updates.models, strict="model")
            self._prepared, self._trainer = prepared, trainer
        self._announced = announcement.version
        prepared.fetch()
        if prepared.newest < announcement.version:
            _log.error(
                "version %d of weights %r was announced, but is not in Redis any more: maker %r "
                "waits for a newer one",
                *(announcement.version, trainer, self._maker),
            )
        self._note_initialised()

    def _note_initialised(self) -> None:
        """Note whether announced weights are loaded, perhaps before they were announced."""
        loaded = self._prepared.version if self._prepared else None
        self.initialised = self.initialised or 0 < self._announced <= (loaded or 0)

    def _await_version(self, least: int) -> None:
        """Load what the thread fetches until the models have version `least`, for a while."""
        end = time.monotonic() + FETCH_S
        while True:
            self._fetched.clear()
            if (self.swap() or 0) >= least or self._error is not None:
                return
            left = end - time.monotonic()
            if left <= 0 or not self._fetched.wait(left):
                return

    def _fetch_next(self, wait_s: float) -> None:
        if self.prepare(wait_s):
            self._fetched.set()
        if isinstance(self._error, StoreUnavailable):
            self._error = None

    def _failed(self, error: Exception) -> None:
        self._error = error
        self._fetched.set()
