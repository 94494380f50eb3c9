"""Weights of a maker's models: announced by a trainer, fetched, loaded as a whole under a lock."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from redrb.connection import Client
from redrb.connection.deadline import Deadline, here
from redrb.connection.outage import Outage
from redrb.connection.stop import Stop
from redrb.errors import DecodeError, StoreUnavailable, WeightError, WeightMismatch, WeightTimeout
from redrb.keys import WeightKeys, maker_key, partial_weights, trainer_key
from redrb.runtime.announcements import Agreement, Announcement, AnnouncementReader
from redrb.runtime.model_updates import ModelUpdates
from redrb.weights import WeightSubscriber
from redrb.weights.reading.missing import MissingWeights
from redrb.weights.reading.standby import BackgroundFetch, PreparedLoad
from redrb.weights.tensors.fitting import Strict

_log = logging.getLogger("redrb")

_WAIT_S = 0.5
"""Longest wait for an announcement; then the caller is asked whether it is to end."""


class WeightFollower:
    """Keeps a maker's models at the newest announced weights.

    The maker follows the trainers that name it. Until a trainer does, it follows a trainer that it
    chose itself, so that makers of any name may join a run.

    `prepare` fetches an update beside the models and `load` loads it; two threads may call them.
    The full update and the partial update of one announcement are loaded together.

    Attributes:
        version: Version of the weights in the models; None before the first update.
        complete: Whether a full update was loaded.
        ready: Whether a fetched update can be loaded.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        maker: str,
        models: ModelUpdates,
        *,
        chosen: str,
        agree: Mapping[str, str] | None = None,
    ) -> None:
        """Follow the trainers that name `maker`, and the trainer `chosen` until one does.

        Weights of a trainer that has other settings than `agree` are refused (`Agreement`).
        """
        self._client = client
        self._namespace = namespace
        self._maker = maker
        self._chosen_name = chosen
        self._to_maker = AnnouncementReader(client, maker_key(namespace, maker))
        self._by_chosen: AnnouncementReader | None = AnnouncementReader(
            client, trainer_key(namespace, chosen)
        )
        self._models = models
        self._agreement = Agreement(maker, agree or {})
        self._trainer = self._run = ""
        self._pending: Announcement | None = None  # not fetched yet, because Redis was away
        self._announced = 0  # the full update that makes the models complete
        self._full: PreparedLoad | None = None
        self._partial: PreparedLoad | None = None
        self._changing = threading.Lock()  # held while fetched updates change
        self.version: int | None = None
        self.complete = self.ready = False

    def follow(self) -> bool:
        """Load the update that was announced since the last call; returns whether one was.

        Raises:
            WeightMismatch: The update does not fit the models, which keep their weights.
            StoreUnavailable: Redis stayed away; the next call goes on.
            ConfigError: A trainer with other settings than the maker's has started.
        """
        return self._follow(0.0)

    def wait_until_complete(self, timeout: float, ended: Callable[[], bool]) -> None:
        """Wait until a full update is loaded, or `ended` returns true; it is called often.

        The wait also goes on while Redis is away and while announced weights are gone.

        Raises:
            WeightTimeout: No full update came in time.
            WeightMismatch: It does not fit the models, which keep their weights.
            ConfigError: The trainer has other settings than the maker.
            DecodeError: An announcement or the weights are damaged.
        """
        started = time.monotonic()
        keys = WeightKeys.of(self._namespace, self.trainer)
        missing = MissingWeights(self._client, keys, self.trainer)
        cause: Exception | None = None
        outage = Outage(f"maker {self._maker!r} still waits for weights")
        while not self.complete and not ended():
            left = started + timeout - time.monotonic()
            if left <= 0:
                if self._agreement.pending:
                    raise self._agreement.pending
                raise WeightTimeout(
                    name=f"of {self._trainer or self._chosen_name} for maker {self._maker}",
                    newer_than=0,
                    newest=None,
                    waited_s=time.monotonic() - started,
                ) from cause
            try:
                if not self._follow(min(left, _WAIT_S)) and not self._agreement.pending:
                    missing.log()
                outage.over()
            except WeightMismatch:
                raise
            except (StoreUnavailable, WeightError) as error:
                cause = error
                outage.failed(error)
                here().pause(min(left, _WAIT_S))

    def prepare(self, wait_s: float) -> bool:
        """Fetch the update that was announced since the last call.

        Args:
            wait_s: Seconds to wait for an announcement.

        Returns:
            Whether there was an announcement.
        """
        found = self._next_announcement(0.0 if self._pending else wait_s)
        announcement = found if self._agreement.accepts(found) else self._pending
        if announcement is None:
            return found is not None
        self._pending = announcement
        try:
            with self._changing:
                self._fetch(announcement)
        except StoreUnavailable:
            raise
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        return True

    @property
    def trainer(self) -> str:
        """Name of the trainer that is followed."""
        return self._trainer or self._chosen_name

    @property
    def fetching(self) -> bool:
        """Whether a fetch is under way."""
        return self._changing.locked()

    def load(self) -> bool:
        """Load the fetched update, unless a fetch is under way; never waits for Redis.

        The caller holds the lock of the models.

        Returns:
            Whether it was loaded.

        Raises:
            WeightMismatch: The update does not fit the models.
        """
        if not self._changing.acquire(blocking=False):
            return False
        try:
            self.ready = False
            full, partial = self._full, self._partial
            if full is not None:
                self._load(full)
                if self._announced and (full.version or 0) >= self._announced:
                    self.complete = True
                base = full.version or 0
                if partial is not None and full.ready is None and (partial.ready or 0) > base:
                    self._load(partial)
            return True
        except WeightMismatch:
            raise
        except BaseException:  # loading broke off: the models hold a mixture until it is repeated
            self.version, self.ready = None, True
            raise
        finally:
            self._changing.release()

    def _load(self, fetched: PreparedLoad) -> None:
        loaded = fetched.load()
        if loaded is not None:
            self.version = loaded
            self._models.all_loaded()

    def _follow(self, wait_s: float) -> bool:
        found = self.prepare(wait_s)
        if self.ready:
            with self._models.held():
                self.load()
        return found

    def _next_announcement(self, wait_s: float) -> Announcement | None:
        """Return the announcement since the last look, if there is one.

        Only one stream is waited on, since the two may be on different nodes of a cluster. While
        the chosen trainer's is waited on, the maker's own is read at the beginning of each call.
        """
        announcement = self._to_maker.newest()
        if announcement is not None:
            self._by_chosen = None
        elif self._by_chosen is not None:
            announcement = self._by_chosen.newest(wait_s)
        elif wait_s:
            announcement = self._to_maker.newest(wait_s)
        return announcement

    def _fetch(self, announcement: Announcement) -> None:
        self.ready = False  # until all of the update is fetched
        full = self._full
        if full is None or announcement.trainer != self._trainer:
            self._trainer, self.complete = announcement.trainer, False
            full = self._follow_trainer(announcement.trainer)
        elif (
            announcement.full and announcement.run != self._run and announcement.full <= full.newest
        ):  # versions start again from 1, in a Redis that was emptied
            full = self._follow_trainer(announcement.trainer)
        self._announced = announcement.full
        if full.newest < announcement.full:
            self._fetch_full(full, announcement)
        if full.newest and full.newest >= announcement.full:
            self._fetch_partial(full, announcement)
        self.ready = True

    def _follow_trainer(self, trainer: str) -> PreparedLoad:
        """Follow a trainer's weights from the beginning."""
        self._full = self._prepared_load(trainer, "model")
        self._partial = self._prepared_load(partial_weights(trainer), strict=False)
        return self._full

    def _prepared_load(self, name: str, strict: Strict) -> PreparedLoad:
        subscriber = WeightSubscriber(
            self._client, name, namespace=self._namespace, lock=self._models.lock
        )
        return subscriber.prepared_load(self._models.models, strict=strict)

    def _fetch_full(self, full: PreparedLoad, announcement: Announcement) -> None:
        if full.fetch():
            self._run = announcement.run
            # a full update overwrites the partial updates that were loaded
            self._partial = self._prepared_load(partial_weights(announcement.trainer), strict=False)
        if full.newest < announcement.full:
            _log.error(
                "version %d of weights %r was announced, but is not in Redis any more: maker %r "
                "waits for a newer one",
                *(announcement.full, announcement.trainer, self._maker),
            )

    def _fetch_partial(self, full: PreparedLoad, announcement: Announcement) -> None:
        """Fetch the partial update that belongs on top of the full update."""
        name = partial_weights(announcement.trainer)
        partial = self._partial
        if partial is None or announcement.partial <= max(full.newest, partial.newest):
            return
        while partial.fetch() and partial.newest > full.newest:
            newer_full = True
            try:
                newer_full = full.fetch()  # a full update that is not announced yet
            finally:
                if newer_full:
                    partial = self._partial = self._prepared_load(name, strict=False)
            if not newer_full:
                return


class InFlightUpdates(BackgroundFetch):
    """Follows announcements in a thread, and lets generation swap updates in between tokens."""

    def __init__(self, follower: WeightFollower, models: ModelUpdates) -> None:
        super().__init__("redrb-in-flight", follower)
        self._follower = follower
        self._models = models
        self._error: Exception | None = None
        self._fetched = threading.Event()  # the thread has fetched an update, or failed

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the thread during this block; a fetch that is under way ends in the background."""
        self._start()
        try:
            yield
        finally:
            self._end()

    def swap(self) -> int | None:
        """Load the fetched update, if there is one; `check` raises an error that came up.

        Returns:
            The version that the models have.
        """
        try:
            self._swap_in(self._models.held())
        except (WeightError, DecodeError) as error:
            self._error = error
        return self._follower.version

    def await_version(self, least: int, seconds: float) -> None:
        """Load what the thread fetches until the models have version `least`, for a while."""
        end = time.monotonic() + seconds
        while True:
            self._fetched.clear()
            if (self.swap() or 0) >= least or self._error is not None:
                return
            left = end - time.monotonic()
            if left <= 0 or not self._fetched.wait(left):
                return

    def check(self) -> None:
        """Raise the error since the last call; while Redis is away, raise that at each call."""
        error = self._error
        if error is not None:
            if not isinstance(error, StoreUnavailable):
                self._error = None
            raise error

    def _fetch_next(self, wait_s: float) -> None:
        if self._follower.prepare(wait_s):
            self._fetched.set()
        if isinstance(self._error, StoreUnavailable):
            self._error = None

    def _failed(self, error: Exception) -> None:
        self._error = error
        self._fetched.set()


FETCH_S = 5.0
"""Longest wait for weights that are fetched beside generation, once there is a right to begin."""

_ONE_ATTEMPT = Stop()
_ONE_ATTEMPT.ask()


class MakerWeights:
    """Keeps the models of a maker at the newest weights, also while Redis comes and goes.

    Attributes:
        updates: The models with their lock.
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
        first_timeout: float,
        in_flight: bool,
        wait_for_first: bool = True,
        update_timeout: float = 60.0,
        agree: Mapping[str, str] | None = None,
    ) -> None:
        """Follow a trainer; nothing is loaded yet.

        Args:
            first_timeout: Seconds to wait for a full update before the first batch.
            update_timeout: Seconds between two calls of an update in chunks, until it is dropped.
            agree: Text of each setting in which the trainer must agree with the maker.
        """
        self.updates = ModelUpdates(models, timeout_s=update_timeout)
        self.fetch_s = 0.0
        self._maker, self._stop, self._first_timeout = maker, stop, first_timeout
        self._follower = WeightFollower(
            *(client, namespace, maker, self.updates), chosen=follow, agree=agree
        )
        self._in_flight = InFlightUpdates(self._follower, self.updates) if in_flight else None
        self._initialised = not wait_for_first
        self._outage = Outage(f"maker {maker!r} goes on with the weights it has")

    @property
    def version(self) -> int | None:
        """Version of the weights in the models; None before the first update."""
        return self._follower.version

    @property
    def trainer(self) -> str:
        """Name of the trainer whose weights are followed."""
        return self._follower.trainer

    def prefetching(self) -> AbstractContextManager[None]:
        """With in-flight updates, fetch them in a thread while this block runs."""
        return self._in_flight.running() if self._in_flight else nullcontext()

    def wait_until_initialised(self) -> bool:
        """Wait for the first full update; False if the maker was asked to end before it came.

        Raises:
            WeightTimeout: No full update came in time.
            WeightMismatch: The update does not fit the models.
            ConfigError: The trainer has other settings than the maker.
        """
        if not self._initialised:
            with Deadline(stop=self._stop):
                self._follower.wait_until_complete(
                    self._first_timeout, lambda: bool(self._stop) or self._initialised
                )
            self._initialised = self._initialised or self._follower.complete
        return self._initialised

    def refresh(self, least: int | None = None) -> None:
        """Load the newest weights; while Redis is unreachable, keep the current ones.

        Args:
            least: Version for which a fetch beside generation is waited for, a few seconds.

        Raises:
            WeightError, DecodeError: The first update cannot be loaded. Later ones are logged.
            ConfigError: A trainer with other settings than the maker's has started.
        """
        began = time.monotonic()
        try:
            self._refresh(least)
        finally:
            self.fetch_s += time.monotonic() - began

    def _refresh(self, least: int | None) -> None:
        away = self._outage.lasts
        try:
            if self._in_flight is not None:
                self._in_flight.check()
                if least is not None and self.version is not None and self.version < least:
                    self._in_flight.await_version(least, FETCH_S)
            else:
                with Deadline(stop=_ONE_ATTEMPT if away else self._stop):
                    self._follower.follow()
        except StoreUnavailable as error:
            if not self._stop:
                self._outage.failed(error)
        except (WeightError, DecodeError) as error:
            if self._follower.version is None:
                raise
            _log.error("maker %r keeps the weights it has: %s", self._maker, error)
        else:
            self._outage.over()

    def begin_batch(self) -> tuple[int | None, dict[str, Any]]:
        """Return the version that a batch begins with, and options for its experience maker.

        With in-flight updates, the option `before_token` loads new weights between two tokens.
        """
        if self._in_flight is None:
            return self.version, {}
        return self._in_flight.swap(), {"before_token": self._in_flight.swap}

    def update(
        self,
        states: Mapping[str, Mapping[str, Tensor] | None],
        lora_configs: Mapping[str, Mapping[str, Any] | None],
        *,
        full: bool,
        first: bool | None,
        last: bool | None,
    ) -> None:
        """Update the models from this process, in one call or in chunks.

        A call with neither `first` nor `last` is a chunk of the update that this thread has begun;
        if there is none, it is a whole update. With `full`, the models are complete after it.

        Raises:
            WeightError: This thread has no update under way, or makes experience just now.
            WeightMismatch: A tensor does not fit the models, which keep their old weights.
        """
        single = not first and not last and not self.updates.begun
        if first or single:
            self.updates.begin()
        try:
            for model, state in states.items():
                if state is not None:
                    self.updates.stage(model, state, None if full else lora_configs[model])
        except BaseException:
            self.updates.drop(ended=bool(last) or single)
            raise
        if last or single:
            self.updates.end()
            self._initialised = self._initialised or full
