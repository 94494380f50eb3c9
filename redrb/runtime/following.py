"""A maker's side of weight updates: told by a trainer, fetched whole, loaded under the lock."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from redrb.connection import Client
from redrb.connection.stopping import pause
from redrb.errors import StoreUnavailable, WeightError, WeightMismatch, WeightTimeout
from redrb.runtime.broadcast import partial_name
from redrb.runtime.inbox import Announcement, Box, inbox_of, outbox_of
from redrb.runtime.model_updates import ModelUpdates
from redrb.weights import WeightSubscriber
from redrb.weights.reading.prepared_load import PreparedLoad
from redrb.weights.tensors.fitting import Strict

_log = logging.getLogger("redrb")

_SLICE_S = 0.5
"""Longest wait before it is looked whether the caller is to end."""


class WeightFollower:
    """Keeps a maker's models at what trainers have announced last.

    Those that name the maker, from the first that does so on. Until then, one that it chose itself:
    so makers of any name may join a run, and need not be known to anyone.

    An update is fetched beside the models by `prepare` and loaded by `load`, which two threads may
    call. Of one announcement the full update and the partial one on top are loaded together.

    Attributes:
        version: Version of the weights in the models; None before the first update.
        complete: Whether a full update was loaded.
        ready: Whether there is something to load.
    """

    def __init__(
        self, client: Client, namespace: str, maker: str, models: ModelUpdates, *, chosen: str
    ) -> None:
        """Follow whoever names `maker`, and the trainer `chosen` while nobody does."""
        self._client = client
        self._namespace = namespace
        self._maker = maker
        self._chosen_name = chosen
        self._inbox = Box(client, inbox_of(namespace, maker))
        self._chosen: Box | None = Box(client, outbox_of(namespace, chosen))
        self._models = models
        self._trainer = self._run = ""
        self._news: Announcement | None = None  # not fetched yet, since Redis was away
        self._announced = 0  # the full update that makes the models complete
        self._full: PreparedLoad | None = None
        self._partial: PreparedLoad | None = None
        self._changing = threading.Lock()  # what is ready
        self.version: int | None = None
        self.complete = self.ready = False

    def follow(self) -> bool:
        """Load what was announced since the last call, if anything was; returns whether it was.

        Raises:
            WeightMismatch: It does not fit the models; they keep their old weights.
            WeightError, DecodeError: As `WeightSubscriber.poll` does; the models keep their old
                weights until the next announcement.
            StoreUnavailable: Redis stayed away; the next call goes on.
        """
        return self._follow(0.0)

    def wait_until_complete(self, timeout: float, ended: Callable[[], bool]) -> None:
        """Wait until a full update is loaded, or the caller is to end, which is looked at often.

        A Redis that is away, and weights that are gone, are waited for as well.

        Raises:
            WeightTimeout: None came in time.
            WeightMismatch: It does not fit the models; they keep their old weights.
            DecodeError: An announcement or the weights are damaged.
        """
        started = time.monotonic()
        trouble: Exception | None = None
        while not self.complete and not ended():
            left = started + timeout - time.monotonic()
            if left <= 0:
                raise WeightTimeout(
                    name=f"of {self._trainer or self._chosen_name} for maker {self._maker}",
                    newer_than=0,
                    newest=None,
                    waited_s=time.monotonic() - started,
                ) from trouble
            try:
                self._follow(min(left, _SLICE_S))
            except WeightMismatch:
                raise
            except (StoreUnavailable, WeightError) as error:
                trouble = error
                _log.warning("maker %r still waits for weights: %s", self._maker, error)
                pause(min(left, _SLICE_S))

    def prepare(self, seconds: float) -> bool:
        """Fetch what was announced since the last call; wait for an announcement so long at most.

        Returns:
            Whether there was one.

        Raises:
            As `follow` does.
        """
        news = self._look(0.0 if self._news else seconds) or self._news
        if news is None:
            return False
        self._news = news
        try:
            with self._changing:
                self._fetch(news)
        except StoreUnavailable:
            raise
        except BaseException:
            self._news = None
            raise
        self._news = None
        return True

    @property
    def fetching(self) -> bool:
        """Whether something is on its way at this moment."""
        return self._changing.locked()

    def load(self) -> bool:
        """Load what is ready, unless just at this moment more is fetched; never waits for Redis.

        The caller holds the lock of the models.

        Returns:
            Whether it could.

        Raises:
            WeightMismatch: It does not fit the models.
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
        except BaseException:  # it broke off within: the models hold a mixture until it is repeated
            self.version, self.ready = None, True
            raise
        finally:
            self._changing.release()

    def _follow(self, seconds: float) -> bool:
        found = self.prepare(seconds)
        if self.ready:
            with self._models.held():
                self.load()
        return found

    def _look(self, seconds: float = 0.0) -> Announcement | None:
        """Return what was announced since the last look; wait for it so long at most.

        One box is waited for at a time, since they may be on different nodes of a cluster: while
        nobody names the maker, that it is named is noticed at the next look.
        """
        news = self._inbox.newest()
        if news is not None:
            self._chosen = None
        elif self._chosen is not None:
            news = self._chosen.wait(seconds)
        elif seconds:
            news = self._inbox.wait(seconds)
        return news

    def _fetch(self, news: Announcement) -> None:
        self.ready = False  # until all of it is there
        full = self._full
        if full is None or news.trainer != self._trainer:  # another one: its versions are its own
            self._trainer, self.complete = news.trainer, False
            full = self._begin(news.trainer)
        elif news.full and news.run != self._run and news.full <= full.newest:
            full = self._begin(news.trainer)  # versions began anew, in an emptied Redis
        self._announced = news.full
        if full.newest < news.full:
            self._fetch_full(full, news)
        if full.newest and full.newest >= news.full:
            self._fetch_partial(full, news)
        self.ready = True

    def _begin(self, trainer: str) -> PreparedLoad:
        """Follow a trainer's weights from their beginning."""
        self._full = self._ahead(trainer, "model")
        self._partial = self._ahead(partial_name(trainer), strict=False)
        return self._full

    def _ahead(self, name: str, strict: Strict) -> PreparedLoad:
        subscriber = WeightSubscriber(
            self._client, name, namespace=self._namespace, lock=self._models.lock
        )
        return subscriber.ahead(self._models.models, strict=strict)

    def _fetch_full(self, full: PreparedLoad, news: Announcement) -> None:
        if full.fetch():
            self._run = news.run
            # what was loaded of parts is overwritten
            self._partial = self._ahead(partial_name(news.trainer), strict=False)
        if full.newest < news.full:
            _log.error(
                "version %d of weights %r was announced and is gone from Redis: maker %r waits for "
                "a newer one",
                *(news.full, news.trainer, self._maker),
            )

    def _fetch_partial(self, full: PreparedLoad, news: Announcement) -> None:
        """Fetch the part that belongs on top of the full update."""
        name = partial_name(news.trainer)
        partial = self._partial
        if partial is None or news.partial <= max(full.newest, partial.newest):
            return
        while partial.fetch() and partial.newest > full.newest:
            below = True
            try:
                below = full.fetch()  # a full update that is not announced yet
            finally:
                if below:
                    partial = self._partial = self._ahead(name, strict=False)
            if not below:
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
