"""`Republishing`: publishes a trainer's last weights once more when a reader finds them damaged."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from redrb.connection import Client
from redrb.connection.deadline import Deadline, here
from redrb.connection.messages import BLOCK_S, block_on_stream
from redrb.connection.retries import insist
from redrb.connection.stop import Stop
from redrb.errors import PublisherFenced, RedrbError, StoreClosed
from redrb.keys import WeightKeys
from redrb.weights import WeightPublisher, WeightVersion

_log = logging.getLogger("redrb")


class Republishing:
    """A thread that waits for readers which ask for a full version.

    Without it a trainer could wait for groups that are not too stale, and its makers for weights
    that they can load.
    """

    def __init__(
        self,
        client: Client,
        keys: WeightKeys,
        publisher: WeightPublisher,
        announce: Callable[[WeightVersion], None],
    ) -> None:
        """Start the thread; `announce` is called with each version that it has published."""
        self._client, self._key = client.at(keys.asked), keys.asked
        self._publisher, self._announce = publisher, announce
        self._last, self._busy = "0-0", False
        self._over = Stop(0.0)
        self._thread = threading.Thread(target=self._run, name="redrb-republish", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and wait for it if it publishes."""
        self._over.end(self._thread, here().left_s if self._busy else 0.0)

    def _run(self) -> None:
        def note(error: Exception) -> None:
            _log.debug("it is not known whether readers ask for a full version: %s", error)

        with Deadline(stop=self._over, budget=self._over), suppress(RedrbError):  # it ends
            while not self._over:
                insist(
                    self._look,
                    self._over,
                    note,
                    errors=RedrbError,
                    unless=(StoreClosed, PublisherFenced),
                )

    def _look(self) -> None:
        asked = block_on_stream(self._client, self._key, self._last, BLOCK_S)
        if not asked:
            return
        self._last = asked[-1][0].decode()
        self._busy = True
        try:
            version = self._publisher.republish()
            if version is not None:
                _log.warning(
                    "weights %r: a reader found them damaged in Redis, so they are published once "
                    "more, in full, as version %d",
                    version.name,
                    version.version,
                )
                self._announce(version)
        finally:
            self._busy = False
