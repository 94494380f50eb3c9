"""How a maker hands over what it made: without end, and not for ever once it is asked to end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from redrb.connection.stopping import Stop as Hurry
from redrb.connection.stopping import stoppable
from redrb.errors import SendFailed
from redrb.runtime.stopping import StopRequest
from redrb.stream.sending import ExperienceSender, GroupedRows

_log = logging.getLogger("redrb")

_NO_ROOM = "for which there was no room in time: trainers have ended, or are behind (`redrb stats`)"


class GracefulSender:
    """Waits for room in a maker's sender, for `stop_timeout` when the maker is asked to end.

    What finds no room by then is given up: trainers have ended, or are far behind.
    """

    def __init__(
        self, sender: ExperienceSender, stop: StopRequest, hurry: Hurry, *, stop_timeout: float
    ) -> None:
        """Take over a sender.

        Args:
            sender: Sends.
            stop: Whether the maker is asked to end.
            hurry: Ends waits then.
            stop_timeout: Seconds.
        """
        self._sender = sender
        self._stop = stop
        self._hurry = hurry
        self._stop_timeout = stop_timeout
        self._deadline: float | None = None
        self._gave_up = False
        self._lost = 0  # groups that found no room in the sender

    def send(self, rows: GroupedRows) -> None:
        """Hand over what was made.

        Raises:
            SendFailed: Something made before could not be sent, or this found no room; what only
                tells of what was given up before is offered once more.
        """
        self._patiently(partial(self._sender.send, rows), lambda: len(rows.rows()))

    def flush(self) -> None:
        """Wait until all of it is in Redis.

        Raises:
            SendFailed: Something could not be sent.
        """
        self._patiently(self._sender.flush)

    def close(self, name: str, timeout: float) -> None:
        """Send what is not sent yet; what was given up is told in one warning.

        Raises:
            SendFailed: Not everything could be sent in time, and not since it was given up.
        """
        failure: SendFailed | None = None
        try:
            self._sender.close(timeout=0.0 if self._gave_up else timeout)
        except SendFailed as error:
            failure = error
        lost, self._lost = self._lost, 0
        if self._gave_up and (lost or failure):
            groups = lost + (failure.unsent + failure.dropped if failure else 0)
            trouble = failure.__cause__ if failure else None
            why = _NO_ROOM if trouble is None else f"which could not be put: {trouble}"
            _log.warning("maker %r ends: %d groups are given up, %s", name, groups, why)
        if failure is not None and (failure.dropped or not self._gave_up):
            raise failure

    def _patiently(self, send: Callable[..., None], in_hand: Callable[[], int] = lambda: 0) -> None:
        """Run `send(timeout=...)`; when it only tells of earlier ones, offer what is `in_hand`."""
        told = self._tried(send)
        if told is None:
            return
        last = self._tried(send) if told.dropped else told
        if last is not None:
            self._lost += in_hand()
            self._gave_up = bool(self._stop)
            if last is not told:
                told.dropped += last.dropped
                told.add_note(f"{in_hand()} groups made last are given up as well: {last}")
        if told.dropped or not self._stop:
            raise told

    def _tried(self, send: Callable[..., None]) -> SendFailed | None:
        """Run `send(timeout=...)` as long as there is time, and return what failed."""
        try:
            with stoppable(self._hurry):
                send(timeout=None)
        except SendFailed as failure:
            if failure.dropped or not self._stop:
                return failure
        else:
            return None
        if self._deadline is None:
            self._deadline = time.monotonic() + self._stop_timeout
        try:
            send(timeout=max(0.0, self._deadline - time.monotonic()))
        except SendFailed as failure:
            return failure
        return None
