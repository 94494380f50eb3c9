"""`ExperienceSender`: what makers give their experience to."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

from redrb.checks import checked_int_or_none, checked_timeout
from redrb.errors import ConfigError, SendFailed
from redrb.experience.records import Scalar
from redrb.stream import ExperienceStream
from redrb.stream.arguments import AnyStatus
from redrb.stream.put.items import GroupedRows, Items
from redrb.stream.put.options import PutOptions
from redrb.stream.sending.copying import Parcel
from redrb.stream.sending.stream_senders import Job, Most, StreamSenders
from redrb.stream.waiting import Wait

MAX_GROUPS = 256
"""Most groups that a sender holds where nothing is said."""


class ExperienceSender:
    """Puts experience in the background, so that a maker does not wait for Redis.

    Each group is put exactly once, in order for each stream, however long Redis is away; memory is
    bounded, and `send` waits at the bound. Groups are dealt out over several streams in turn, as
    ColossalAI's `ExperienceMakerHolder` does among trainers. May be shared by threads. What is
    not in when the process dies is lost: `flush` before a checkpoint.

    Attributes:
        backpressure_s: Seconds that calls of `send` have waited for room.

    Example:
        >>> with ExperienceSender(stream) as sender:
        ...     for prompts in loader:
        ...         sender.send(make_experience(prompts), policy_version=7)
    """

    def __init__(
        self,
        streams: ExperienceStream | Sequence[ExperienceStream],
        *,
        max_groups: int | None = None,
        max_bytes: int | None = None,
        timeout: float | None = None,
        offload: bool = True,
    ) -> None:
        """Start a thread for each stream.

        Args:
            streams: Where to; they stay the caller's, to be closed after the sender.
            max_groups: Most groups that are held at a time; default: 256 unless `max_bytes` is
                given. One `send` that is larger by itself is taken when nothing else is held.
            max_bytes: Most bytes of tensors that are held; default: no limit.
            timeout: Default of `send`, `flush` and `close`; None waits for ever, and logs every
                half minute what it waits for.
            offload: Copy tensors to the CPU in `send`, so that the caller may change them. Without
                it they are the sender's from then on, and encoded where they are.

        Raises:
            ConfigError: No stream, or a bad limit.
        """
        several = [streams] if isinstance(streams, ExperienceStream) else list(streams)
        if not several or not all(isinstance(stream, ExperienceStream) for stream in several):
            raise ConfigError("a sender needs at least one redrb.ExperienceStream.")
        if max_groups is None and max_bytes is None:
            max_groups = MAX_GROUPS
        self._most = Most(
            checked_int_or_none("max_groups", max_groups, 1),
            checked_int_or_none("max_bytes", max_bytes, 1),
        )
        self._timeout = checked_timeout(timeout)
        self._offload = offload
        self._turn = threading.Lock()
        self._cursor = 0
        self._closed = False
        self.backpressure_s = 0.0
        self._lanes = StreamSenders(several)
        self._finalizer = weakref.finalize(self, self._lanes.let_go)
        self._finalizer.atexit = False  # what is left then is waited for by `lanes`

    def __repr__(self) -> str:
        return f"<redrb.ExperienceSender {self.waiting_groups} groups waiting>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except SendFailed as failure:
            if error is None:
                raise
            error.add_note(f"While this was handled: {failure}")

    @property
    def waiting_groups(self) -> int:
        """Groups that are not in yet."""
        return self._lanes.groups

    @property
    def waiting_bytes(self) -> int:
        """Bytes of their tensors."""
        return self._lanes.nbytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes of tensors that were held at once."""
        return self._lanes.peak_nbytes

    @property
    def sent_groups(self) -> int:
        """Groups that are in, those that a filter dropped included."""
        return self._lanes.put

    @property
    def dropped_groups(self) -> int:
        """Groups that were given up, and told by an error."""
        return self._lanes.dropped

    def send(
        self,
        items: Items | GroupedRows,
        *,
        policy_version: int | None = None,
        priority: float | None = None,
        status: AnyStatus | None = None,
        tags: Mapping[str, Scalar | None] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Take experience over; returns at once unless the bound is reached.

        Args:
            items: As for `stream.put`: a list of samples is one group, one sample a group of its
                own, and an Experience one group a row; of `GroupedRows(experience)` those with the
                same `group_id` are one group.
            policy_version, priority, status, tags: As for `stream.put`.
            timeout: Seconds to wait for room; default: the sender's.

        Raises:
            RecordError, ConfigError: This cannot be put.
            SendFailed: Something that was sent before is given up (`dropped`; the rest of its
                `send` for that stream with it), or there was no room in time (`unsent`).
            All of them: what this call was given was not taken over; the sender goes on.
        """
        self._check_open()
        own_tags = None if tags is None else dict(tags)
        PutOptions.checked(policy_version, priority, status, own_tags)
        given = {
            "policy_version": policy_version,
            "priority": priority,
            "status": status,
            "tags": own_tags,
        }
        parcel = Parcel.of(items)
        self._lanes.tell()
        if not parcel.groups:
            return
        with self._room_for(parcel, self._wait(timeout)):
            try:
                own = parcel.copied() if self._offload else parcel
                self._deal(own, given)
            except BaseException:
                self._lanes.cancel(parcel)
                raise

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all that was sent is in.

        Raises:
            SendFailed: It is not, in time: `unsent` groups are still on their way. Or `dropped`
                groups were given up since the last call.
        """
        self._check_open()
        self._lanes.flush(self._wait(timeout))
        self._lanes.tell()

    def close(self, timeout: float | None = None) -> None:
        """Put what is left, and end; closing twice does no harm.

        It lasts `timeout` seconds and at most two more, so it may be called when SIGTERM came.

        Raises:
            SendFailed: `unsent` groups were not in in time and are given up, of which those just
                on their way may have landed; `dropped` groups were given up before.
        """
        seconds = self._timeout if timeout is None else checked_timeout(timeout)
        self._closed = True
        self._finalizer.detach()
        self._lanes.close(seconds)

    def _wait(self, timeout: float | None) -> Wait:
        return Wait(self._timeout if timeout is None else checked_timeout(timeout))

    @contextmanager
    def _room_for(self, parcel: Parcel, wait: Wait) -> Iterator[None]:
        """Wait for this call's turn and for room, and count the parcel in."""
        with ExitStack() as scope:
            began = time.monotonic()
            try:
                while not self._turn.acquire(timeout=wait.slice_s()):
                    if wait.over:
                        raise self._lanes.late("are sent by others", self.waiting_groups)
                scope.callback(self._turn.release)
                self._lanes.reserve(parcel, self._most, wait)
            finally:
                self.backpressure_s += time.monotonic() - began
            yield

    def _deal(self, parcel: Parcel, given: Mapping[str, object]) -> None:
        """Give each lane the groups whose turn is its."""
        lanes, count = self._lanes.lanes, len(self._lanes.lanes)
        jobs = {}
        for number, lane in enumerate(lanes):
            part = parcel.part((number - self._cursor) % count, count)
            if part.groups:
                jobs[lane] = Job(part, given)
        self._lanes.give(jobs)
        self._cursor = (self._cursor + parcel.groups) % count

    def _check_open(self) -> None:
        if not self._lanes.is_ours:
            raise ConfigError(
                "a sender belongs to the process that made it: make one after a fork."
            )
        if self._closed:
            raise ConfigError("the sender is closed.")
