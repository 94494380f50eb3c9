"""The groups that an `ExperienceSender` holds: counted, bounded, and the errors of lost ones."""

from __future__ import annotations

import logging
import threading

from redrb.connection.deadline import here
from redrb.errors import ConfigError, SendFailed, StoreError
from redrb.stream.sending.held_items import HeldItems

_log = logging.getLogger("redrb")


class Backlog:
    """Counts the groups on their way, and keeps errors for the next call; safe among threads.

    Attributes:
        changed: Notified at every change; its lock guards all attributes.
        closed: Whether nothing more is taken over.
        nbytes: Bytes of their tensors.
        unsent: Groups that were given up because the sender was closed.
    """

    def __init__(self, max_groups: int | None, max_bytes: int | None) -> None:
        self._max_groups, self._max_bytes = max_groups, max_bytes
        self.changed = threading.Condition()
        self.closed = False
        self.groups = self.nbytes = self.unsent = 0
        self._failures: list[tuple[Exception, int]] = []
        self._outages: dict[object, StoreError] = {}

    def reserve(self, held: HeldItems) -> None:
        """Count items in when there is room; there always is when nothing else is held.

        Raises:
            SendFailed: There was no room in time.
            ConfigError: The sender was closed.
        """
        deadline = here()
        with self.changed:
            while self.groups and not (
                (self._max_groups is None or self.groups + held.groups <= self._max_groups)
                and (self._max_bytes is None or self.nbytes + held.nbytes <= self._max_bytes)
            ):
                self.check_open()
                if deadline.over:
                    problem = f"left no room for more within {deadline.waited_s:.1f} s"
                    raise self.late(self.groups, problem)
                deadline.log(f"a sender is full with {self.groups} groups")
                self.changed.wait(deadline.slice_s())
            self._count(held.groups, held.nbytes)

    def cancel(self, held: HeldItems) -> None:
        """Count items out that were reserved, and that no stream sender gets."""
        with self.changed:
            self._count(-held.groups, -held.nbytes)

    def settle(self, held: HeldItems, unsent: int) -> None:
        """Count items out that were put, except `unsent` groups that were given up."""
        with self.changed:
            self.unsent += unsent
            self._count(-held.groups, -held.nbytes)

    def fail(self, error: Exception, dropped: int) -> None:
        """Keep an error, because of which groups were dropped, for the next call."""
        with self.changed:
            self._failures.append((error, dropped))
        _log.error("a sender drops %d groups: %s", dropped, error)  # in case no call follows

    def note_outage(self, sender: object, error: StoreError | None) -> None:
        """Keep the error because of which a thread cannot put now; None: it can again."""
        if error is None:
            self._outages.pop(sender, None)
        else:
            self._outages[sender] = error

    def raise_failures(self) -> None:
        """Raise the errors since the last call as SendFailed, which counts the groups given up."""
        with self.changed:
            failures, self._failures = self._failures, []
        if failures:
            first, dropped = failures[0][0], sum(count for _, count in failures)
            more = f", and {len(failures) - 1} more errors" if len(failures) > 1 else ""
            raise SendFailed(
                f"{dropped} groups that were sent before are given up: {first}{more}",
                dropped=dropped,
            ) from first

    def late(self, unsent: int, problem: str) -> SendFailed:
        """Return the error for groups that are not stored, with the reason if it is known."""
        outage = next(iter(list(self._outages.values())), None)
        behind = "trainers may be behind (`redrb top --namespace NAMESPACE`)"
        why = behind if outage is None else str(outage)
        failure = SendFailed(f"{unsent} groups {problem}: {why}", unsent=unsent)
        failure.__cause__ = outage
        return failure

    def given_up(self, unsent: int) -> SendFailed:
        """Return the error for groups that are given up at the end, and for earlier failures."""
        failure = self.late(unsent, "were not stored in time, and are given up")
        failure.dropped = sum(count for _, count in self._failures)
        for error, _ in self._failures:
            failure.add_note(f"given up before: {error}")
        return failure

    def check_open(self) -> None:
        """Raise ConfigError after the sender was closed."""
        if self.closed:
            raise ConfigError("the sender is closed.")

    def _count(self, groups: int, nbytes: int) -> None:
        self.groups += groups
        self.nbytes += nbytes
        self.changed.notify_all()
