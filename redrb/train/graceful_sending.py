"""Sending from a maker's loop: it waits for room, and gives up in time once the loop is to end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from redrb.connection.deadline import Deadline
from redrb.connection.stop import Stop
from redrb.errors import SendFailed
from redrb.stream import Admission
from redrb.stream.sending import ExperienceSender, GroupedRows
from redrb.words import counted

_log = logging.getLogger("redrb")

_NO_ROOM = (
    "for which there was no room in time: trainers have ended, or are behind "
    "(`redrb top --namespace NAMESPACE`)"
)


@dataclass
class GracefulSender:
    """Sends without a deadline until the maker is asked to end, then within `stop_timeout` seconds.

    Groups that find no room in that time are given up: trainers have ended, or are far behind.
    """

    sender: ExperienceSender
    stop: Stop
    stop_timeout: float
    _ending: Deadline | None = None
    _gave_up: bool = False
    _lost: int = 0  # groups that found no room in the sender

    def send(self, rows: GroupedRows, admission: Sequence[Admission | None]) -> None:
        """Hand groups to the sender, with the rights that they use of each stream.

        Raises:
            SendFailed: They found no room; or only earlier ones failed, and these are handed over.
        """
        send = partial(self.sender.send, rows, admission=admission)
        self._send_or_give_up(send, len(rows.rows()))

    def flush(self) -> None:
        """Wait until all groups are in Redis.

        Raises:
            SendFailed: Some groups could not be sent.
        """
        self._send_or_give_up(self.sender.flush)

    def close(self, name: str, timeout: float) -> None:
        """Send the remaining groups; a warning counts the groups that were given up.

        Raises:
            SendFailed: Not all groups could be sent in time, and none was given up before.
        """
        failure: SendFailed | None = None
        try:
            with Deadline(at_most=timeout):
                self.sender.close(timeout=0.0 if self._gave_up else timeout)
        except SendFailed as error:
            failure = error
        lost, self._lost = self._lost, 0
        if self._gave_up and (lost or failure):
            groups = lost + (failure.unsent + failure.dropped if failure else 0)
            cause = failure.__cause__ if failure else None
            why = _NO_ROOM if cause is None else f"which could not be put: {cause}"
            given_up = counted(groups, "group", "are")
            _log.warning("maker %r ends: %s given up, %s", name, given_up, why)
        if failure is not None and (failure.dropped or not self._gave_up):
            raise failure

    def _send_or_give_up(self, send: Callable[[], None], in_hand: int = 0) -> None:
        """Run `send`, once more if it failed for groups of earlier calls only."""
        earlier: SendFailed | None = None
        while (failure := self._attempt(send)) is not None:
            if failure.dropped and earlier is None:
                earlier = failure
            elif not failure.dropped and self.stop and self._ending is None:
                self._ending = Deadline(at_most=self.stop_timeout)
            else:
                self._lost += in_hand
                self._gave_up = bool(self.stop)
                break
        if earlier is not None and failure is not None:
            earlier.dropped += failure.dropped
            earlier.add_note(
                f"{counted(in_hand, 'group')} made last and given up as well: {failure}"
            )
        error = earlier or failure
        if error is not None and (error.dropped or not self.stop):
            raise error

    def _attempt(self, send: Callable[[], None]) -> SendFailed | None:
        """Run `send` until the loop is to end, or in the time after that; return its error."""
        try:
            with self._ending or Deadline(stop=self.stop):
                send()
        except SendFailed as failure:
            return failure
        return None
