"""`Agreement`: refuses the weights of a trainer that was started with other settings."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from redrb.connection import Client
from redrb.errors import ConfigError, WeightTimeout
from redrb.keys import WeightKeys, trainer_key
from redrb.runtime.announcements import Announcement, AnnouncementReader
from redrb.runtime.job_end import GRACE_S
from redrb.weights.reading.missing import MissingWeights

_WAIT_S = 0.5

_log = logging.getLogger("redrb")


class Agreement:
    """Compares a maker's settings with those that trainers announce.

    An announcement that a maker finds when it begins may be that of an earlier run, whose successor
    starts at the same moment. Such a one is logged, and refused only if no trainer with the maker's
    settings announces itself in `GRACE_S` seconds. Each later one is refused at once.

    Attributes:
        pending: The error of the newest announcement, while its successor is waited for.
    """

    def __init__(self, maker: str, settings: Mapping[str, str]) -> None:
        """Make it.

        Args:
            maker: Name of the maker.
            settings: Text of each setting in which makers and trainer must agree; with none, every
                trainer is accepted, as are trainers that announce none.
        """
        self._maker = maker
        self._settings = settings
        self._began = False
        self.pending: ConfigError | None = None
        self._ends = 0.0

    def accepts(self, announcement: Announcement | None) -> bool:
        """Return whether a trainer has the maker's settings.

        Args:
            announcement: What the maker's newest look has found; None: nothing new.

        Raises:
            ConfigError: The trainer has other settings; the message names those that differ.
        """
        first, self._began = not self._began, True
        if announcement is None:
            if self.pending is not None and time.monotonic() >= self._ends:
                raise self.pending
            return False
        differing = self._differing(announcement.settings)
        if not differing:
            self.pending = None
            return True
        self.pending = ConfigError(
            f"trainer {announcement.trainer!r} has other settings than maker {self._maker!r}: "
            f"{differing}. Start all workers of a job with the same settings."
        )
        if not first:
            raise self.pending
        self._ends = time.monotonic() + GRACE_S
        _log.warning(
            "%s This maker makes nothing, and ends in %.0f s unless a trainer with its settings "
            "starts",
            *(self.pending, GRACE_S),
        )
        return False

    def wait(self, client: Client, namespace: str, trainer: str, timeout: float) -> None:
        """Wait until a trainer with the maker's settings has announced itself.

        Raises:
            ConfigError: As `accepts`.
            WeightTimeout: No trainer has announced itself in time.
            DecodeError, StoreUnavailable: As `AnnouncementReader.newest`.
        """
        reader = AnnouncementReader(client, trainer_key(namespace, trainer))
        missing = MissingWeights(client, WeightKeys.of(namespace, trainer), trainer)
        ends = time.monotonic() + timeout
        while (left := ends - time.monotonic()) > 0:
            if self.accepts(reader.newest(min(left, _WAIT_S))):
                return
            if self.pending is None:
                missing.log()
        raise self.pending or WeightTimeout(
            name=trainer, newer_than=0, newest=None, waited_s=timeout
        )

    def _differing(self, others: Mapping[str, str]) -> str:
        mine = self._settings
        if not mine or not others:
            return ""
        names = sorted(mine.keys() | others.keys())
        pairs = [(name, others.get(name, "unknown"), mine.get(name, "unknown")) for name in names]
        return ", ".join(f"{name} is {a} there and {b} here" for name, a, b in pairs if a != b)
