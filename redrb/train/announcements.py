"""How makers learn of weights: trainers announce versions to the makers that they name, and to all.

A trainer that has ended its job announces that in the same way, with its newest versions.

A trainer posts each announcement to the stream of every maker that it names, and to one stream of
the trainer, which is read by makers that no trainer names. A stream keeps only its newest message,
so that a maker which starts late, or restarts, finds it. Announcing a version twice does no harm.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Protocol

import msgspec

from redrb.checks import MOST
from redrb.connection import Client
from redrb.connection.deadline import Deadline, here
from redrb.connection.messages import MessageReader, post
from redrb.connection.retries import insist
from redrb.connection.stop import Stop
from redrb.errors import ConfigError, DecodeError, RedrbError, StoreClosed
from redrb.keys import check_name, trainer_key

MAX_REASON = 500
"""Most characters of the reason for which a job is over."""

_LARGEST = sys.float_info.max


class Announcement(msgspec.Struct, frozen=True):
    """The newest weights of a trainer.

    Attributes:
        version: Its newest version; 0 if there is none yet.
        ended: Why the job is over; "": it goes on.
        reward: The evaluated reward at which the job was over with these weights; None: unknown.
        settings: Text of each setting of the trainer in which its makers must agree with it.
    """

    trainer: str
    version: Annotated[int, msgspec.Meta(ge=0, le=MOST)] = 0
    ended: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""
    reward: Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)] | None = None
    settings: dict[str, str] = {}


def announce(client: Client, keys: Sequence[str], announcement: Announcement) -> None:
    """Post an announcement, which wakes the makers that wait for one.

    Raises:
        StoreUnavailable: Redis stayed away; some makers may have the announcement.
    """
    post(client, keys, msgspec.structs.asdict(announcement))


class AnnouncementReader:
    """Reads the newest announcement of one stream, or waits for one."""

    def __init__(self, client: Client, key: str) -> None:
        self._messages = MessageReader(client, key)
        self.last: Announcement | None = None

    def newest(self, wait_s: float = 0.0) -> Announcement | None:
        """Return the newest announcement, unless it was returned before; wait so long for one.

        Raises:
            DecodeError: The announcement is damaged; the next call skips it.
            StoreUnavailable: Redis stayed away.
        """
        message = self._messages.newest(wait_s)
        if message is None:
            return None
        try:
            found = msgspec.convert(message, Announcement)
            check_name("trainer", found.trainer)
        except (msgspec.ValidationError, ConfigError) as error:
            raise DecodeError(f"an announcement of weights is damaged: {error}") from error
        self.last = found
        return found


class FollowedWeights(Protocol):
    """Weights of a trainer that a maker follows, for its models or for an inference server."""

    client: Client
    namespace: str

    @property
    def name(self) -> str:
        """Name of the trainer."""

    async def update(self) -> object:
        """Wait for the first weights, and load them."""

    async def follow(self) -> None:
        """Load later weights, until the task is cancelled."""

    async def reach(self, version: int) -> None:
        """While `follow` runs, wait until it has loaded this version, or cannot load it now."""


_log = logging.getLogger("redrb")


class Agreement:
    """Compares a maker's settings with those that trainers announce, if both have any.

    An announcement that a maker finds when it begins may be that of an earlier run, whose successor
    starts at the same moment. Such a one is logged, and refused only if no trainer with the maker's
    settings announces itself in `GRACE_S` seconds. Each later one is refused at once.

    Attributes:
        pending: The error of the newest announcement, while its successor is waited for.
    """

    def __init__(self, maker: str, settings: Mapping[str, str]) -> None:
        self._maker = maker
        self._settings = settings
        self._began = False
        self.pending: ConfigError | None = None
        self._ends = 0.0

    def accepts(self, announcement: Announcement | None) -> bool:
        """Return whether a trainer was found; raises ConfigError if its settings are others."""
        first, self._began = not self._began, True
        if announcement is None:
            if self.pending is not None and time.monotonic() >= self._ends:
                raise self.pending
            return False
        mine, others = self._settings, announcement.settings
        names = sorted(mine.keys() | others.keys()) if mine and others else ()
        pairs = [(name, others.get(name, "unknown"), mine.get(name, "unknown")) for name in names]
        differing = ", ".join(f"{name} is {a} there and {b} here" for name, a, b in pairs if a != b)
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
            self.pending,
            GRACE_S,
        )
        return False


GRACE_S = 30.0
"""How long an end that was announced before a maker began may still be taken back."""

_WAIT_S = 1.0
"""Longest wait for an announcement; then the thread checks whether it is to end."""


@dataclass
class JobEnd:
    """Asks a maker's loop to end when the trainer that it follows has announced the end of the job.

    A maker that sends to several trainers goes on until all of them have. An end that a maker finds
    when it begins is often that of an earlier run, whose successor starts at the same moment, so
    the maker first waits whether a trainer takes it back.
    """

    weights: FollowedWeights
    others: Sequence[str]
    stop: Stop
    _readers: dict[str, AnnouncementReader] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run the thread in this block."""
        over = Stop(0.0)
        thread = threading.Thread(target=self._run, args=(over,), name="redrb-job-end", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.end(thread, here().left_s)

    def _run(self, over: Stop) -> None:
        grace_ends = time.monotonic() + GRACE_S
        began = True

        def look() -> None:
            nonlocal began
            name, why = self._look()
            if why and not over and (not began or time.monotonic() >= grace_ends):
                self.stop.ask(f"trainer {name!r} has ended the job: {why}")
            else:
                began = began and bool(why)
                self._read(name, _WAIT_S)

        def note(error: Exception) -> None:
            _log.debug("a maker cannot see whether its job is over: %s", error)

        with Deadline(stop=over, budget=over), suppress(RedrbError):  # it ends, or is closed
            while not (over or self.stop):
                insist(
                    look,
                    over,
                    note,
                    errors=RedrbError,
                    unless=StoreClosed,
                    over=lambda: bool(self.stop),
                )

    def _look(self) -> tuple[str, str]:
        """Return a trainer that goes on, and ""; or the followed one, and why its job is over."""
        followed, ends = self.weights.name, []
        for name in dict.fromkeys((followed, *self.others)):
            last = self._read(name)
            if last is not None and last.ended:
                ends.append(last.ended)
            elif last is not None or name == followed:
                return name, ""  # of the others, some are names of tasks, and no trainers
        return followed, ends[0]

    def _read(self, name: str, wait_s: float = 0.0) -> Announcement | None:
        if name not in self._readers:
            key = trainer_key(self.weights.namespace, name)
            self._readers[name] = AnnouncementReader(self.weights.client, key)
        self._readers[name].newest(wait_s)
        return self._readers[name].last
