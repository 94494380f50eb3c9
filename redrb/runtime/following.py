"""A maker's side of weight updates: announced by a trainer, fetched, loaded under a lock."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from redrb.connection import Client
from redrb.connection.deadline import here
from redrb.connection.outage import Outage
from redrb.errors import StoreUnavailable, WeightError, WeightMismatch, WeightTimeout
from redrb.keys import WeightKeys, maker_key, partial_weights, trainer_key
from redrb.runtime.agreement import Agreement
from redrb.runtime.announcements import Announcement, AnnouncementReader
from redrb.runtime.model_updates import ModelUpdates
from redrb.weights import WeightSubscriber
from redrb.weights.reading.missing import MissingWeights
from redrb.weights.reading.prepared_load import PreparedLoad
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
            WeightError, DecodeError: As `WeightSubscriber.poll` does; the models keep their
                weights until the next announcement.
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

        Raises:
            As `follow` does.
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
            self._load_full()
            self._load_partial()
            return True
        except WeightMismatch:
            raise
        except BaseException:  # loading broke off: the models hold a mixture until it is repeated
            self.version, self.ready = None, True
            raise
        finally:
            self._changing.release()

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

    def _load_full(self) -> None:
        if self._full is None:
            return
        loaded = self._full.load()
        if loaded is not None:
            self.version = loaded
            self._models.all_loaded()
        if self._announced and (self._full.version or 0) >= self._announced:
            self.complete = True

    def _load_partial(self) -> None:
        if self._partial is None or self._full is None or self._full.ready is not None:
            return
        if (self._partial.ready or 0) > (self._full.version or 0):
            loaded = self._partial.load()
            if loaded is not None:
                self.version = loaded
                self._models.all_loaded()
