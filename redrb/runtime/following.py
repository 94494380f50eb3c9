"""A maker's side of weight updates: told by a trainer, fetched whole, loaded under the lock."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable

from torch import Tensor

from redrb.connection import Client
from redrb.connection.stopping import pause
from redrb.errors import StoreUnavailable, WeightError, WeightMismatch, WeightTimeout
from redrb.runtime.broadcast import partial_name
from redrb.runtime.inbox import Announcement, Box, inbox_of, outbox_of
from redrb.runtime.lora import decode_configs
from redrb.runtime.updates import ModelUpdates
from redrb.weights import WeightSubscriber

_log = logging.getLogger("redrb")

_SLICE_S = 0.5
"""Longest wait before it is looked whether the caller is to end."""


class WeightFollower:
    """Keeps a maker's models at what trainers have announced last.

    Those that name the maker, from the first that does so on. Until then, one that it chose itself:
    so makers of any name may join a run, and need not be known to anyone.

    Attributes:
        version: Version of the weights in the models; None before the first update.
        complete: Whether a full update was loaded.
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
        self._news: Announcement | None = None  # not loaded yet, since Redis was away
        self._subscribers: dict[str, WeightSubscriber] = {}
        self.version: int | None = None
        self.complete = False

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

    def _follow(self, seconds: float) -> bool:
        news = self._look(0.0 if self._news else seconds) or self._news
        if news is None:
            return False
        self._news = news
        try:
            self._load(news)
        except StoreUnavailable:
            raise
        except BaseException:
            self._news = None
            raise
        self._news = None
        return True

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

    def _load(self, news: Announcement) -> None:
        if news.trainer != self._trainer:  # another one took over: its versions are its own
            self._trainer, self.complete = news.trainer, False
            self._subscribe(news.trainer)
        full = self._subscribers[news.trainer]
        if news.full and news.run != self._run and news.full <= (full.version or 0):
            full = self._subscribe(news.trainer)  # versions began anew, in an emptied Redis
        if (full.version or 0) < news.full:
            self._load_full(full, news)
        if full.version and full.version >= news.full and news.partial > (self.version or 0):
            self._load_partial(news)

    def _subscribe(self, name: str) -> WeightSubscriber:
        """Follow weights from their beginning."""
        subscriber = WeightSubscriber(
            self._client, name, namespace=self._namespace, lock=self._models.lock
        )
        self._subscribers[name] = subscriber
        return subscriber

    def _load_full(self, full: WeightSubscriber, news: Announcement) -> None:
        if full.poll(self._models.tensors(), strict="model") is not None:
            for model in self._models.models:
                self._models.loaded(model)
            self.version, self._run = full.version, news.run
            self._subscribe(partial_name(news.trainer))  # what it had loaded is overwritten
        if (full.version or 0) >= news.full:
            self.complete = True
        else:
            _log.error(
                "version %d of weights %r was announced and is gone from Redis: maker %r waits for "
                "a newer one",
                *(news.full, news.trainer, self._maker),
            )

    def _load_partial(self, news: Announcement) -> None:
        partial = self._subscribers[partial_name(news.trainer)]
        if not news.lora:
            partial.poll(self._models.tensors(), strict=False)
            self.version = max(self.version or 0, partial.version or 0)
            return
        newest = partial.latest()
        state: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in partial.fetch(newest.version if newest else None).items():
            model, _, own = name.partition(".")
            state[model][own] = tensor
        configs = decode_configs(news.lora)
        with self._models.exclusive():
            self._models.load(
                {},
                {
                    model: (tensors, configs.get(model, {}))
                    for model, tensors in state.items()
                    if model in self._models.models
                },
            )
        self.version = newest.version if newest else news.partial
