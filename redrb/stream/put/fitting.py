"""Prepares a put again for the task as it is now: indexed values, and the fields of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from redrb.codec import decode_items, parse_group
from redrb.errors import RecordError
from redrb.stream.put.batch import NO_VALUES, PutBatch, index_values, reads_samples
from redrb.stream.put.pending import PendingPut
from redrb.stream.put.refusals import OnBadGroup, log_dropped, misfit_errors, unversioned_errors
from redrb.stream.task.description import TaskDescription
from redrb.stream.task.task import Task


def fitted(pending: PendingPut, task: Task, on_bad_group: OnBadGroup) -> PutBatch:
    """Return the batch of a put for the settings that its task has now.

    All completed groups of a batch have the same fields. If those of the task are others by now,
    because another process has put first, nothing of the batch is stored. If the task has a bound
    of staleness by now, groups without a weight version are refused, as those of later puts are.

    Raises:
        RecordError: The task does not take some of the groups, and bad groups are not dropped, or
            others of the put are stored already.
    """
    description, done = task.description, len(pending.ids)
    batch = reindexed(pending.batch, description)
    left, places = batch.groups[done:], range(done, len(batch.groups))
    if batch.kind and description.kind not in ("", batch.kind):
        misfits = misfit_errors(places, left, description.kind)
        if misfits:
            _refuse(batch, misfits, task.name, drops=not done and on_bad_group == "drop")
            return _keeping(batch, [], task)
        batch = replace(batch, kind="")
    if batch.versions and description.staleness.any:
        found = unversioned_errors(places, left)
        if found:
            _refuse(batch, found, task.name, drops=not done and on_bad_group == "drop")
            return _keeping(batch, [place for place in places if place not in found], task)
    return batch


def _refuse(batch: PutBatch, found: Mapping[int, RecordError], task: str, *, drops: bool) -> None:
    """Raise the error of the first bad group, or log those of all if bad groups are dropped."""
    if not drops:
        replace(batch, refused=found).raise_refused()
    log_dropped(task, found.values())


def _keeping(batch: PutBatch, kept: Sequence[int], task: Task) -> PutBatch:
    """Return some of the groups; the others count as filtered, and their rights return."""
    groups = [batch.groups[place] for place in kept]
    fewer = replace(
        batch,
        groups=groups,
        values=NO_VALUES,
        kind=batch.kind if kept else "",
        rights=batch.rights.returning_from(len(kept)),
        sources=batch.sources.keeping(kept),
        filtered=batch.filtered + len(batch.groups) - len(kept),
    )
    return reindexed(fewer, task.description) if kept else fewer


def reindexed(batch: PutBatch, description: TaskDescription) -> PutBatch:
    """Return the groups with the values that the task indexes now, read from their bytes.

    Another process may give a task tags or a rule for the newest token while a producer has it
    open. The groups of that producer's next put were prepared without them, and the samples
    themselves may have been changed since.
    """
    if not reads_samples(description, batch.options):
        return replace(batch, revision=description.revision, values=NO_VALUES)
    groups = [decode_items(parse_group(group.blob)) for group in batch.groups]
    values = index_values(description, groups, batch.options)
    return replace(batch, revision=description.revision, values=values)
