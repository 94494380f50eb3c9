"""`PartCollector`: stores parts of groups, and puts a group when its parts are there."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from msgspec import structs

from redrb.codec import decode_items, encode_groups, parse_group
from redrb.connection.deadline import Deadline, here
from redrb.connection.transport import Replication
from redrb.errors import (
    ConfigError,
    DecodeError,
    EncodeError,
    OutcomeUnknown,
    RecordError,
    StoreError,
    StoreFull,
)
from redrb.experience import BufferItem
from redrb.stream.assembly.calls import (
    AddPart,
    FindDue,
    FinishParts,
    GroupPart,
    PartReply,
    UnfinishedGroup,
    blob_field,
)
from redrb.stream.put.batch import Claim, PutBatch
from redrb.stream.put.options import PutOptions
from redrb.stream.put.preparer import Groups, Preparer
from redrb.stream.put.producer import PartsEnded, Producer
from redrb.stream.put.rights import NO_RIGHTS, Rights
from redrb.stream.take.cause import MOST_CHARACTERS, NO_CAUSE, Cause
from redrb.stream.task.task import Task
from redrb.unpacking import Reading
from redrb.words import counted

GRACE_MS = 10_000
"""Time after which another process puts a group whose parts are all there: its maker has died."""

_log = logging.getLogger("redrb")


@dataclass(eq=False, repr=False)
class PartCollector:
    """Puts the groups of one stream object that come in parts; safe among threads."""

    _task: Task
    _preparer: Preparer  # without filters; it refuses bad parts
    _prepare: Callable[[Groups, PutOptions], PutBatch]  # filters whole groups, too
    _producer: Producer
    _replication: Replication
    _known: bool = False

    def put(
        self, part: GroupPart, groups: Groups, options: PutOptions, timeout: float | None
    ) -> int | None:
        """Store one part, and the group if it is the last one.

        Returns:
            Id of the group; None while parts are missing, and for a group that was dropped.

        Raises:
            As `ExperienceStream.put_part`.
        """
        batch = self._preparer.prepare_part(groups, replace(options, admission=None))
        with Deadline(timeout):
            return self._put(part, batch, options)

    def _put(self, part: GroupPart, batch: PutBatch, options: PutOptions) -> int | None:
        rights, kept = self._right(options), False
        try:
            reply = self._stored(part, batch, rights, options)
            kept = reply.keeps_right
        finally:
            if kept:
                rights.note_ended(rights.numbers)
            else:
                rights.hand_back(rights.numbers)
        group = reply.group
        if reply.outcome == "whole" and reply.parts is not None:
            group = self._put_parts(reply.parts, reply.parts.claim("completed"))
        if reply.due:
            self.finish_due()
        return group

    def finish_due(self, seconds: float = 0.0) -> bool:
        """Put or remove groups whose makers have died, or that have reached the age limit.

        Goes on for `seconds`; at least one group is put, or a page of them dropped. Each process
        gets other groups.

        Returns:
            Whether there may be more to do now.
        """
        end = time.monotonic() + seconds
        while self._finish_one():
            if time.monotonic() >= end:
                return True
        return False

    def _finish_one(self) -> bool:
        """Drop a page of groups, put or bury one; returns whether there may be more to do now."""
        try:
            found = self._task.store.call(FindDue(GRACE_MS))
            dropped, parts = found.dropped, found.parts
            if dropped:
                _log.warning(
                    "task %r: dropped %s: too few of their parts came in time",
                    self._task.name,
                    counted(dropped, "group"),
                )
            if parts is None:
                return dropped > 0
            there = f"{len(parts.indices)} of {parts.of} parts"
            if len(parts.indices) < parts.least:
                self._end(parts, f"group {parts.key!r} has {there}")
                return True
            if len(parts.indices) == parts.of:
                claim = parts.claim("completed")
            else:
                claim = parts.claim("delivered")
                _log.warning("task %r: group %r is put with %s", self._task.name, parts.key, there)
            with Deadline(0.0):
                self._put_parts(parts, claim)
        except PartsEnded:
            return True
        except Exception as error:  # noqa: BLE001 (also one of a filter, which the user wrote)
            _log.warning(
                "task %r: a group in parts could not be put: %r. %s",
                self._task.name,
                error,
                " ".join(getattr(error, "__notes__", ())),
            )
            # the group is another caller's, until its age limit; an error of the store would meet
            # the next group, too
            return not isinstance(error, StoreError)
        return True

    def _right(self, options: PutOptions) -> Rights:
        """Take a right over from its source, if one is given."""
        source, task = options.admission, self._task
        if source is None:
            return NO_RIGHTS
        if source.task_prefix != task.store.keys.prefix:
            raise ConfigError(
                f"task {task.name!r}: admission= has rights of task {source.task!r}: use those "
                "that admit() of this stream returned."
            )
        return source.hand_over(1)

    def _stored(
        self, part: GroupPart, batch: PutBatch, rights: Rights, options: PutOptions
    ) -> PartReply:
        [group], finished = batch.groups, False
        while True:
            add = AddPart(
                part,
                group.kind if batch.kind else "",
                GRACE_MS,
                self._task.description.incarnation,
                rights.series,
                right=str(rights.numbers[0]) if rights.numbers else "",
                priority=options.priority,
                tags=json.dumps(dict(options.tags)) if options.tags else None,
            )
            first, self._known = not self._known, True  # it brings the text of the script
            request = add.storing(self._task.store, group.blob, self._replication, whole=first)
            reply = request.result()
            if reply.outcome == "gone":
                self._task.reopen(refused_here=True)
            elif reply.outcome == "full" and reply.due and not finished and not here().passed:
                finished = not self._finish_one()
            else:
                self._refuse(part, reply)
                return reply

    def _refuse(self, part: GroupPart, reply: PartReply) -> None:
        """Raise the error of a part that was not stored."""
        task = self._task.name
        if reply.outcome == "differs" and (known := reply.parts) is not None:
            raise ConfigError(
                f"task {task!r}: part {part.index} of group {part.key!r} has of={part.of}, "
                f"least={part.least}, on_incomplete={'dead' if part.bury else 'drop'!r} or fields "
                f"that differ from those of its earlier parts: of={known.of}, "
                f"least={known.least}, on_incomplete={'dead' if known.bury else 'drop'!r}, "
                f"fields {known.kind or 'unknown'}. Give all parts of a group the same, or another "
                "key."
            )
        if reply.outcome == "unadmitted":
            raise ConfigError(
                f"task {task!r} orders groups by their rights: give the first part of group "
                f"{part.key!r} admission=, the right that stream.admit() returned."
            )
        if reply.outcome == "full":
            namespace = self._task.store.keys.namespace
            raise StoreFull(
                f"task {task!r} of namespace {namespace!r}: {counted(part.most, 'group', 'wait')} "
                "for parts already (most_parts): put the missing parts first, lower part_age, or "
                "raise most_parts.",
                task=task,
                namespace=namespace,
                reason="most_parts",
            )

    def _put_parts(self, parts: UnfinishedGroup, claim: Claim) -> int | None:
        """Put a group, if its parts have not become one before."""
        try:
            return self._put_group(parts, claim)
        except PartsEnded as ended:
            return ended.group
        except (StoreError, OutcomeUnknown) as error:
            self._note_retries(error, parts, "")
            raise
        except Exception as error:
            # one that can never be put, due to its samples, is removed at once; another process, or
            # another setting, could put the others before their age limit
            bad = isinstance(error, RecordError | EncodeError | DecodeError)
            if bad or parts.over:
                self._end(parts, f"group {parts.key!r} cannot be put", error)
                error.add_note(f"Group {parts.key!r} {_fate(parts)} with all its parts.")
            else:
                self._note_retries(error, parts, f" until its age limit, when it {_fate(parts)}")
            raise

    def _note_retries(self, error: Exception, parts: UnfinishedGroup, end: str) -> None:
        error.add_note(
            f"All parts of group {parts.key!r} are stored; consumers and calls of put_part try to "
            f"put the group later{end}."
        )

    def _put_group(self, parts: UnfinishedGroup, claim: Claim) -> int | None:
        """Put a group; returns its id, or None if a filter dropped it."""
        rights = NO_RIGHTS
        if parts.right is not None:
            prefix = self._task.store.keys.prefix
            rights = Rights(self._task.name, prefix, parts.series, (parts.right,))
        with Reading("the tags of a group in parts"):
            tags = json.loads(parts.tags) if parts.tags else None
        options = PutOptions(
            priority=parts.priority,
            tags=tags,
            admission=rights if rights else None,
        )
        batch = self._prepare([self._samples(parts)], options)
        batch.raise_refused()
        ids = self._producer.put(structs.replace(batch, parts=claim))
        return ids[0] if ids else None

    def _end(self, parts: UnfinishedGroup, reason: str, error: Exception | None = None) -> None:
        """Move a group to the dead letters, or drop it, as its makers have chosen."""
        group = b""
        if parts.bury:
            try:
                group = encode_groups([self._samples(parts)])[0].blob
            except PartsEnded:
                return
            except (EncodeError, DecodeError) as refusal:  # the letter cannot have samples
                reason = f"{reason}, and its parts cannot be joined: {refusal}"[:MOST_CHARACTERS]
        _log.warning("task %r: %s, and %s", self._task.name, reason, _fate(parts))
        claim = parts.claim("dead" if parts.bury else "dropped")
        consumer = f"{socket.gethostname()[:64]}-{os.getpid()}-parts"
        finish = FinishParts(claim, reason, Cause.of(error) if error else NO_CAUSE, consumer)
        self._task.store.call(finish, group)

    def _samples(self, parts: UnfinishedGroup) -> list[BufferItem]:
        """Return the samples of all parts, with one group id; else raises PartsEnded."""
        client, keys = self._task.store.client, self._task.store.keys
        fields = [blob_field(index, parts.key) for index in parts.indices]
        blobs = client.execute("HMGET", keys.part_blobs, *fields)
        if None in blobs:
            stored = client.execute("HGET", f"{keys.prefix}part_ends", parts.key)
            with Reading(f"the end of the group in parts {parts.key!r:.80}"):
                group = int(stored or 0) or None
            raise PartsEnded(group)
        items = [item for blob in blobs for item in decode_items(parse_group(blob))]
        named = next((item.group_id for item in items if item.group_id is not None), None)
        return [replace(item, group_id=named) for item in items]


def _fate(parts: UnfinishedGroup) -> str:
    return "becomes a dead letter" if parts.bury else "is dropped"
