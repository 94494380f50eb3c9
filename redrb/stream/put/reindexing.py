"""Groups that were prepared for other settings than their task has by now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from redrb.codec import decode_items, parse_group
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.newest_token import newest_version
from redrb.stream.task.tags import tag_values


def described_anew(batch: PutBatch, names: Sequence[str], *, by_token: bool) -> PutBatch:
    """Return the groups with what the task asks for now, read from their bytes.

    Somebody may give a task tags or a rule for the newest token while a producer has it open. What
    that one puts next was prepared without, and its samples may have been changed since.

    Args:
        batch: The groups.
        names: Tags that the task declares.
        by_token: Whether it has a rule for the newest token.

    Raises:
        ConfigError: The put gave a tag that the task does not declare.
        RecordError: A tag of the samples cannot be indexed.
    """
    tags = newest = None
    if names or batch.given_tags or by_token:
        groups = [decode_items(parse_group(b"".join(group.parts))) for group in batch.groups]
        if names or batch.given_tags:
            tags = [tag_values(names, items, batch.given_tags) for items in groups]
        if by_token:
            newest = [newest_version(items) for items in groups]
    return replace(batch, tags=tags, newest=newest)
