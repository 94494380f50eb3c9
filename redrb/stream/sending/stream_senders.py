"""The threads of an `ExperienceSender`, one for each stream, from their start to their end."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Mapping, Sequence

from redrb.connection.deadline import Deadline, here
from redrb.errors import SendFailed
from redrb.forks import mark
from redrb.stream import ExperienceStream
from redrb.stream.sending.backlog import Backlog
from redrb.stream.sending.stream_sender import Job, StreamSender

_log = logging.getLogger("redrb")

JOIN_S = 2.0
"""How long `close` waits, beyond its timeout, for threads that were asked to stop."""

EXIT_S = 10.0
"""How long a process that ends waits for groups of senders that were not closed."""


class StreamSenders:
    """The threads of one sender.

    They outlive a sender that was not closed, and put what they hold before they end.

    Attributes:
        each: One for each stream.
        backlog: The groups that they hold.
    """

    def __init__(self, streams: Sequence[ExperienceStream], backlog: Backlog) -> None:
        self.backlog = backlog
        self.each = [
            StreamSender(stream, self.backlog, number, owner=self)
            for number, stream in enumerate(streams)
        ]
        self._owner = mark()
        _open.add(self)

    @property
    def are_here(self) -> bool:
        """Whether the threads run in this process: a forked process has none of them."""
        return self._owner is mark()

    def hand_over(self, jobs: Mapping[StreamSender, Job]) -> None:
        """Give each thread its job; raises ConfigError after `close`."""
        with self.backlog.changed:
            self.backlog.check_open()
            for sender, job in jobs.items():
                sender.hand_over(job)

    def flush(self) -> None:
        """Wait until all jobs handed over by now have ended; raises SendFailed after the time."""
        backlog, deadline = self.backlog, here()
        with backlog.changed:
            goals = [(sender, sender.accepted) for sender in self.each]
            while any(sender.done < goal for sender, goal in goals):
                if deadline.over:
                    problem = f"are not stored after {deadline.waited_s:.1f} s"
                    raise backlog.late(backlog.groups, problem)
                deadline.log(f"a sender waits until {backlog.groups} groups are stored")
                backlog.changed.wait(deadline.slice_s())

    def end(self) -> None:
        """Let the threads end after their last jobs; never blocks."""
        for sender in self.each:
            sender.end()

    def close(self, timeout: float | None) -> None:
        """Put what is held, for `timeout` seconds at most, end the threads; raises SendFailed."""
        if not self.are_here:
            return
        backlog = self.backlog
        with backlog.changed:
            if backlog.closed:
                return
            backlog.closed = True
        _open.discard(self)
        try:
            with Deadline(timeout):
                self.flush()
        except SendFailed:
            pass  # the groups are counted below
        except BaseException:  # such as KeyboardInterrupt
            _log.error("a sender was interrupted: it drops at most %d groups", backlog.groups)
            raise
        finally:
            self._stop()
        with backlog.changed:
            unsent = backlog.unsent + backlog.groups
        if unsent:
            raise backlog.given_up(unsent)
        backlog.raise_failures()

    def _stop(self) -> None:
        for sender in self.each:
            sender.stop.ask()
            sender.end()
        # counts as time on Redis for a process that was asked to end
        with Deadline(at_most=JOIN_S) as deadline:
            ended = [sender.join(deadline.left_s) for sender in self.each]
        if not all(ended):
            _log.warning("a sender's thread still waits for Redis: it ends when Redis answers")


_open: weakref.WeakSet[StreamSenders] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """Put the groups of senders that were not closed, for a while."""
    for senders in list(_open):
        try:
            senders.close(EXIT_S)
        except SendFailed as failure:
            _log.error("a sender was not closed, and the process ends: %s", failure)
