"""Tags and newest tokens of groups anew, after their task's settings changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from redrb.codec import decode_items, parse_group
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.newest_token import newest_version
from redrb.stream.task.tags import tag_values


def reindexed(batch: PutBatch, names: Sequence[str], *, by_token: bool) -> PutBatch:
    """Return the groups with the values that the task indexes now, read from their bytes.

    Another process may give a task tags or a rule for the newest token while a producer has it
    open. The groups of that producer's next put were prepared without them, and the samples
    themselves may have been changed since.

    Args:
        batch: The groups.
        names: Tags that the task declares.
        by_token: Whether it has a rule for the newest token.

    Raises:
        ConfigError: The put gave a tag that the task does not declare.
        RecordError: A tag of the samples cannot be indexed.
    """
    tags = newest = None
    given = batch.options.tags
    if names or given or by_token:
        groups = [decode_items(parse_group(b"".join(group.parts))) for group in batch.groups]
        if names or given:
            tags = [tag_values(names, items, given) for items in groups]
        if by_token:
            newest = [newest_version(items) for items in groups]
    return replace(batch, tags=tags, newest=newest)
