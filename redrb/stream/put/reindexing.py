"""Takes the values that a task indexes from encoded groups, after its settings changed."""

from __future__ import annotations

from dataclasses import replace

from redrb.codec import decode_items, parse_group
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.index_values import NO_VALUES, index_values, reads_samples
from redrb.stream.task.description import TaskDescription


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
