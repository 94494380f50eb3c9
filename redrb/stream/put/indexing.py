"""Packs the facts of groups, which a task keeps beside their bytes."""

from __future__ import annotations

from typing import Any

import msgpack

from redrb.errors import ConfigError
from redrb.experience import Status
from redrb.orders import Fifo, GroupFacts, checked_score
from redrb.stream.put.batch import PutBatch
from redrb.stream.task.description import TaskDescription


def packed_facts(description: TaskDescription, batch: PutBatch) -> list[bytes]:
    """Return the facts of each group, packed as the script `put/put` reads them.

    Raises:
        ConfigError: This process was not given the `Order` object of the task.
    """
    order = description.order
    if order is None:
        raise ConfigError(
            "this task has an order that is not built in: open the stream with the same Order "
            "object as order= to put here."
        )
    priority, values, pack = batch.options.priority, batch.values, msgpack.Packer().pack
    newest = values.newest or [None] * len(batch.groups)
    tags = values.tags or [()] * len(batch.groups)
    rights = batch.rights.numbers or [None] * len(batch.groups)
    by_arrival = isinstance(order, Fifo)
    packed = []
    for group, token, group_tags, right in zip(batch.groups, newest, tags, rights, strict=True):
        version, status = group.policy_version, group.status
        facts: dict[str, Any] = {
            "size": group.nbytes,
            "samples": group.samples,
        }
        if status is not Status.COMPLETED:
            facts["status"] = status.value
        if not by_arrival:
            seen = GroupFacts(version, priority, group.samples, group.nbytes, status, right)
            score = checked_score(order, seen)
            if score != "arrival":
                facts["score"] = score if isinstance(score, str) else float(score)
        if priority is not None:
            facts["priority"] = float(priority)
        if version is not None:
            facts["version"] = version
        if token is not None:
            facts["newest"] = token
        if group_tags:
            named = zip(values.tag_names, group_tags, strict=True)
            if indexed := {name: value for name, value in named if value is not None}:
                facts["tags"] = indexed  # left out when empty, because Lua packs {} as a list
        packed.append(pack(facts))
    return packed
