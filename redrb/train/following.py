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
from redrb.connection.deadline import Deadline
from redrb.connection.outage import Outage
from redrb.connection.retries import insist
from redrb.connection.stop import Stop
from redrb.errors import (
    DecodeError,
    StoreUnavailable,
    WeightCorrupt,
    WeightError,
    WeightMismatch,
    WeightTimeout,
)
from redrb.keys import maker_key, trainer_key
from redrb.train.announcements import Agreement, Announcement, AnnouncementReader
from redrb.weights import WeightSubscriber
from redrb.weights.reading.missing import MissingWeights
from redrb.weights.reading.standby import BackgroundFetch, PreparedLoad
from redrb.weights.tensors.names import unwrapped

_log = logging.getLogger("redrb")

_WAIT_S = 0.5
"""Longest wait for an announcement; then the caller looks whether it is to end."""

FETCH_S = 5.0
"""Longest wait for weights that are fetched beside generation, once there is a right to begin."""

_ONE_ATTEMPT = Stop()
_ONE_ATTEMPT.ask()


BUSY_S = 600.0
"""Longest wait for the lock of the models."""


class LockedModels:
    """Models that are used under one lock and loaded as a whole.

    Attributes:
        lock: Held by generation, and while weights change.
        loads: How often published weights were loaded.
    """

    def __init__(self, models: Mapping[str, nn.Module | None]) -> None:
        """Guard models by name; None is left out."""
        self.models = {
            name: unwrapped(model) for name, model in models.items() if model is not None
        }
        self.lock = threading.Lock()
        self.loads = 0
        self._user: threading.Thread | None = None

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock; raises WeightError after `BUSY_S`, or if this thread holds it already."""
        if self._user is threading.current_thread():
            raise WeightError(
                "the models cannot be updated while this thread makes experience with them: do it "
                "in on_batch_start or on_send_start, not in on_make_experience_*."
            )
        if not self.lock.acquire(timeout=BUSY_S):
            raise WeightError(
                f"the models were in use for {BUSY_S:g} s: generation hangs, or updates come "
                "faster than they can be loaded."
            )
        self._user = threading.current_thread()
        try:
            yield
        finally:
            self._user = None
            self.lock.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock; does nothing if this thread makes experience and holds it already."""
        if self._user is threading.current_thread():
            yield
        else:
            with self.exclusive():
                yield


class MakerWeights(BackgroundFetch):
    """Keeps the models of a maker at the newest announced weights, also while Redis comes and goes.

    The maker follows the trainers that name it. Until a trainer does, it follows a trainer that it
    chose itself, so that makers of any name may join a run. Weights are fetched beside the models
    and loaded as a whole: between two batches, or with `in_flight`, where a thread fetches them,
    also between two tokens.

    Attributes:
        stop: Ends the waits for Redis when the maker is to end.
        name: Name of the trainer whose weights are followed.
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
        outage = Outage(f"maker {maker!r} goes on with the weights it has")
        super().__init__("redrb-in-flight", outage)
        self.client, self.namespace = client, namespace
        self.maker, self.stop, self.name = maker, stop, follow
        self.models = LockedModels(models)
        self.version: int | None = None
        self.initialised = not wait_for_first
        self._mixed = False  # whether the models hold a mixture
        self.fetch_s = 0.0
        self._first_timeout, self._in_flight = first_timeout, in_flight
        self._to_maker = AnnouncementReader(client, maker_key(namespace, maker))
        self._by_chosen: AnnouncementReader | None = AnnouncementReader(
            client, trainer_key(namespace, follow)
        )
        self._agreement = Agreement(maker, agree or {})
        self._announced = 0
        self._pending: Announcement | None = None  # not fetched yet, because Redis was away

    async def update(self) -> None:
        """Wait for the first weights as `wait_until_initialised` does, in a thread."""
        await asyncio.to_thread(self.wait_until_initialised)

    async def follow(self) -> None:
        """With in-flight updates, fetch weights beside sampling until the task is cancelled."""
        with self.prefetching():
            await asyncio.Event().wait()

    async def reach(self, version: int) -> None:
        """Load a version that is fetched beside sampling, as `refresh` does, in a thread."""
        if self.version is None or self.version < version:
            await asyncio.to_thread(self.refresh, version)

    @contextmanager
    def prefetching(self) -> Iterator[None]:
        """With in-flight updates, fetch them in a thread while this block runs."""
        if self._in_flight:
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
            DecodeError: An announcement is damaged.
        """
        started = time.monotonic()
        missing = MissingWeights(self.client, self.namespace, self.name)
        cause: Exception | None = None
        outage = Outage(f"maker {self.maker!r} still waits for weights")

        def left_s() -> float:
            return max(0.0, started + self._first_timeout - time.monotonic())

        def load() -> bool:
            return self.load_announced(min(left_s(), _WAIT_S))

        with Deadline(stop=self.stop):
            while not (self.initialised or self.stop):
                if not left_s():
                    raise self._agreement.pending or WeightTimeout(
                        name=f"of {self.name} for maker {self.maker}",
                        newer_than=0,
                        newest=None,
                        waited_s=time.monotonic() - started,
                    ) from cause
                try:
                    found = insist(
                        load,
                        self.stop,
                        outage.failed,
                        errors=(StoreUnavailable, WeightError),
                        unless=WeightMismatch,
                        left_s=left_s,
                    )
                except WeightMismatch:
                    raise
                except (StoreUnavailable, WeightError) as error:  # the time is up, or it must end
                    cause = error
                else:
                    if not found and not self._agreement.pending:
                        missing.log()
                    outage.over()
        return self.initialised

    def refresh(self, least: int | None = None) -> None:
        """Load the newest weights; while Redis is unreachable, keep the current ones.

        Args:
            least: Version for which a fetch beside generation is waited for, a few seconds.

        Raises:
            WeightError, DecodeError: The first weights cannot be loaded, for another reason than
                that they are damaged. Damage, and later weights, are logged.
            ConfigError: A trainer with other settings than the maker's has started.
        """
        began = time.monotonic()
        try:
            if self._in_flight:
                self._raise_error()
                if least is not None and self.version is not None and not self._outage.lasts:
                    self._swap_until(least, FETCH_S)
            else:
                with Deadline(stop=_ONE_ATTEMPT if self._outage.lasts else self.stop):
                    self.load_announced()
                self._outage.over()
        except StoreUnavailable as outage:
            if not self.stop:
                self._outage.failed(outage)
        except (WeightError, DecodeError) as wrong:
            if self._mixed or (self.version is None and not isinstance(wrong, WeightCorrupt)):
                raise
            _log.error("maker %r keeps the weights it has: %s", self.maker, wrong)
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
            self._swap_in(self.models.held())
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
        found = self._fetch_next(wait_s)
        self._swap_in(self.models.held())
        return found

    def _fetch_next(self, wait_s: float) -> bool:
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
        self._pending = None
        try:
            self._fetch(announcement)
        except StoreUnavailable:
            self._pending = announcement
            raise
        return True

    def _fetch(self, announcement: Announcement) -> None:
        prepared, trainer = self._prepared, announcement.trainer
        if prepared is None or trainer != self.name:
            subscriber = WeightSubscriber(
                self.client, trainer, namespace=self.namespace, lock=self.models.lock
            )
            prepared = subscriber.prepared_load(self.models.models, strict="model")
            self._prepared, self.name = prepared, trainer
        self._announced = announcement.version
        try:
            prepared.fetch()
        except DecodeError as damage:
            raise WeightCorrupt(str(damage)) from damage
        if prepared.newest < announcement.version:
            _log.error(
                "version %d of weights %r was announced, but is not in Redis any more: maker %r "
                "waits for a newer one",
                announcement.version,
                trainer,
                self.maker,
            )
        self._note_initialised(prepared)

    def _load(self, prepared: PreparedLoad) -> None:
        try:
            loaded = prepared.load()
        except WeightMismatch:
            raise
        except BaseException:  # loading broke off: the models hold a mixture until it is repeated
            self.version, self._mixed = None, True
            raise
        if loaded is not None:
            self.version, self._mixed = loaded, False
            self._note_initialised(prepared)
            self.models.loads += 1

    def _note_initialised(self, prepared: PreparedLoad) -> None:
        """Note whether announced weights are loaded, perhaps before they were announced."""
        loaded = prepared.version or 0
        self.initialised = self.initialised or 0 < self._announced <= loaded
