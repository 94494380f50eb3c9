"""Prepares a put again for the task as it is now: indexed values, and the fields of groups."""

from __future__ import annotations

import logging
from dataclasses import replace

from redrb.stream.put.batch import PutBatch
from redrb.stream.put.index_values import NO_VALUES
from redrb.stream.put.pending import PendingPut
from redrb.stream.put.refusals import OnBadGroup, misfit_errors
from redrb.stream.put.reindexing import reindexed
from redrb.stream.task.task import Task

_log = logging.getLogger("redrb")


def fitted(pending: PendingPut, task: Task, on_bad_group: OnBadGroup) -> PutBatch:
    """Return the batch of a put for the settings that its task has now.

    All completed groups of a batch have the same fields. If those of the task are others by now,
    because another process has put first, nothing of the batch is stored.

    Raises:
        RecordError: The task's groups have other fields, and bad groups are not dropped.
    """
    description, done = task.description, len(pending.ids)
    batch = reindexed(pending.batch, description)
    if not batch.kind or description.kind in ("", batch.kind):
        return batch
    left = batch.groups[done:]
    found = misfit_errors(range(done, len(batch.groups)), left, description.kind)
    if not found:
        return replace(batch, kind="")
    refused = replace(batch, refused=found)
    if done or on_bad_group == "raise":
        refused.raise_refused()
    for error in found.values():
        _log.error("task %r: a group is dropped: %s", task.name, error)
    emptied = replace(refused, groups=(), values=NO_VALUES, kind="", refused={})
    emptied = replace(emptied, rights=batch.rights.returning_from(0))
    return replace(emptied, filtered=batch.filtered + len(batch.groups))
