"""`ExperienceSender`: puts experience from background threads, while its maker goes on."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from redrb.checks import checked_int_or_none
from redrb.connection.deadline import Deadline, checked_timeout
from redrb.errors import ConfigError, SendFailed
from redrb.experience.records import Scalar
from redrb.scopes import Entered
from redrb.stream import ExperienceStream
from redrb.stream.admission import Admission
from redrb.stream.arguments import AnyStatus
from redrb.stream.put.options import PutOptions
from redrb.stream.put.preparer import Items
from redrb.stream.sending.job import GroupedRows, SendJob
from redrb.stream.sending.write_behind import WriteBehind

MAX_GROUPS = 256
"""Default of `max_groups`."""


class ExperienceSender(Entered):
    """Puts experience in the background, so that a maker does not wait for Redis.

    Each group is put exactly once, in order for each stream, however long Redis is away. Memory is
    bounded, and `send` waits at the bound. Several streams get groups in turn, as ColossalAI's
    `ExperienceMakerHolder` deals them out to trainers. One sender may be shared by threads. Groups
    that are not stored when the process dies are lost: `flush` before a checkpoint.

    Attributes:
        backpressure_s: Seconds that calls of `send` have waited for room.

    Examples:
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
            streams: The streams to put into; the caller closes them after the sender.
            max_groups: Most groups that are held at a time; default: 256 unless `max_bytes` is
                given. A larger `send` is taken over when nothing else is held.
            max_bytes: Most bytes of tensors that are held; default: no limit.
            timeout: Default of `send`, `flush` and `close` in seconds; None waits for ever, and
                logs the reason every half minute.
            offload: Copy tensors to the CPU in `send`, so that the caller may change them. Without
                it the caller must not change them, and they are encoded where they are.

        Raises:
            ConfigError: There is no stream, or a limit is not usable.
        """
        several = [streams] if isinstance(streams, ExperienceStream) else list(streams)
        if not several or not all(isinstance(stream, ExperienceStream) for stream in several):
            raise ConfigError("a sender needs at least one redrb.ExperienceStream.")
        if max_groups is None and max_bytes is None:
            max_groups = MAX_GROUPS
        self._timeout = checked_timeout(timeout)
        self._offload = offload
        self._streams, self._cursor = len(several), 0
        self.backpressure_s = 0.0
        self._behind = WriteBehind(
            several,
            checked_int_or_none("max_groups", max_groups, 1),
            checked_int_or_none("max_bytes", max_bytes, 1),
        )
        self._finalizer = weakref.finalize(self, self._behind.end)
        self._finalizer.atexit = False  # `write_behind` waits for the threads at exit

    def __repr__(self) -> str:
        return f"<redrb.ExperienceSender {self.waiting_groups} groups waiting>"

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except SendFailed as failure:
            if error is None:
                raise
            error.add_note(f"While this was handled: {failure}")

    @property
    def waiting_groups(self) -> int:
        """Groups that are not stored yet."""
        return self._behind.groups

    def send(
        self,
        items: Items | GroupedRows,
        *,
        policy_version: int | None = None,
        priority: float | None = None,
        status: AnyStatus | None = None,
        tags: Mapping[str, Scalar | None] | None = None,
        admission: Admission | Sequence[Admission | None] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Take experience over; returns at once unless the bound is reached.

        Args:
            items: As for `stream.put`: a list of samples is one group; one sample is a group by
                itself; each row of an Experience is a group. In `GroupedRows(experience)` the rows
                with the same `group_id` are one group.
            policy_version, priority, status, tags: As for `stream.put`.
            admission: As for `stream.put`; for several streams a list, with the rights of each
                stream in its place, or None for a stream that gets no group: see `shares`. Rights
                are used by the background put, also after their block has ended; groups that are
                given up return theirs.
            timeout: Seconds to wait for room; default: the sender's.

        Raises:
            RecordError, ConfigError: The items or options cannot be put.
            SendFailed: Groups that were sent before are given up (`dropped`, with the rest of their
                `send` for that stream), or there was no room in time (`unsent`).
            All of them: the items of this call were not taken over; the sender goes on.
        """
        self._behind.check_open()
        kept_tags = dict(tags) if isinstance(tags, Mapping) else tags
        options = PutOptions.checked(policy_version, priority, status, kept_tags, None)
        rights = self._checked_rights(admission)
        job = SendJob.of(items, options)
        self._behind.raise_failures()
        if not job.groups:
            return
        began = time.monotonic()
        with Deadline(self._seconds(timeout)), ExitStack() as scope:
            try:
                scope.enter_context(self._behind.room_for(job.groups, job.nbytes))
            finally:
                self.backpressure_s += time.monotonic() - began
            self._deal(job, rights)

    def shares(self, groups: int) -> list[int]:
        """Return how many groups each stream gets of a `send` of so many, if it is the next."""
        count = self._streams
        return [len(range(self._first(number), groups, count)) for number in range(count)]

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all groups that were sent are stored.

        Raises:
            SendFailed: They are not, in time: `unsent` groups are still on their way. Or `dropped`
                groups were given up since the last call.
        """
        self._behind.check_open()
        with Deadline(self._seconds(timeout)):
            self._behind.flush()
        self._behind.raise_failures()

    def close(self, timeout: float | None = None) -> None:
        """Put what is held, and end the threads; closing twice does no harm.

        It lasts `timeout` seconds and at most two more, so a handler of SIGTERM may call it.

        Raises:
            SendFailed: `unsent` groups were not stored in time and are given up; groups of the last
                request may have arrived all the same. `dropped` groups were given up before.
        """
        seconds = self._timeout if timeout is None else checked_timeout(timeout)
        self._finalizer.detach()
        self._behind.close(seconds)

    def _seconds(self, timeout: float | None) -> float | None:
        return self._timeout if timeout is None else timeout

    def _deal(self, job: SendJob, rights: Sequence[Admission | None]) -> None:
        """Give each stream its groups: every n-th of them with n streams, across calls."""
        parts = dict[int, SendJob]()
        try:
            for number, admission in enumerate(rights):
                part = job.part(self._first(number), self._streams)
                if part.groups:
                    parts[number] = part = part.copied() if self._offload else part
                    part.use(admission)
            self._behind.hand_over(parts)
        except BaseException:
            for part in parts.values():
                part.return_rights()
            raise
        self._cursor = (self._cursor + job.groups) % self._streams

    def _first(self, stream: int) -> int:
        """Return the first group of the next `send` that a stream gets."""
        return (stream - self._cursor) % self._streams

    def _checked_rights(
        self, admission: Admission | Sequence[Admission | None] | None
    ) -> Sequence[Admission | None]:
        """Return the rights of each stream."""
        count = self._streams
        several = [admission] if isinstance(admission, Admission) else admission
        if several is None:
            return [None] * count
        usable = isinstance(several, Sequence) and len(several) == count
        if not usable or not all(isinstance(each, Admission | None) for each in several):
            raise ConfigError(
                f"admission={admission!r:.80}: a sender of {count} streams needs what admit() of "
                "each stream returned, in a list with one entry for each stream."
            )
        return several
