"""Weights of a maker's models: loaded at first in full, then before each batch or token."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.connection.outage import Outage
from redrb.connection.stop import Stop
from redrb.errors import DecodeError, StoreUnavailable, WeightError
from redrb.runtime.following import WeightFollower
from redrb.runtime.maker_settings import WeightSettings
from redrb.runtime.model_updates import ModelUpdates
from redrb.weights.reading.background_fetch import BackgroundFetch


class InFlightUpdates(BackgroundFetch):
    """Follows announcements in a thread, and lets generation swap updates in between tokens."""

    def __init__(self, follower: WeightFollower, models: ModelUpdates) -> None:
        super().__init__("redrb-in-flight")
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
        """Raise the error since the last call; while Redis is away, raise that at each call.

        Raises:
            As `WeightFollower.follow` does.
        """
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

    @property
    def _is_ready(self) -> bool:
        return self._follower.ready

    @property
    def _is_fetching(self) -> bool:
        return self._follower.fetching

    def _load(self) -> bool:
        return self._follower.load()

    def _failed(self, error: Exception) -> None:
        self._error = error
        self._fetched.set()


_log = logging.getLogger("redrb")

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
        settings: WeightSettings,
        stop: Stop,
    ) -> None:
        """Follow a trainer; nothing is loaded yet.

        Args:
            client: Connection to Redis.
            namespace: Namespace of maker and trainers.
            maker: Name of the maker.
            models: The models by name, such as actor and critic.
            settings: How the maker gets weights.
            stop: Ends waits.
        """
        self.updates = ModelUpdates(models, timeout_s=settings.update_timeout)
        self.fetch_s = 0.0
        self._maker = maker
        self._settings = settings
        self._stop = stop
        self._follower = WeightFollower(
            *(client, namespace, maker, self.updates),
            chosen=settings.follow,
            agree=settings.agree,
        )
        self._in_flight = (
            InFlightUpdates(self._follower, self.updates) if settings.in_flight else None
        )
        self._initialised = not settings.wait_for_first
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
                    self._settings.first_timeout, lambda: bool(self._stop) or self._initialised
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

        Args:
            states: Tensors by name, for each model; None: no tensors of this model.
            lora_configs: Settings of LoRA layers by name, for each model.
            full: Whether the models are complete after this update.
            first: Whether the update begins with this call.
            last: Whether the update ends with this call. With neither, the call is a chunk of the
                update that this thread has begun; if there is none, it is a whole update.

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
