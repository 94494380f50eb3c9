"""`with_sums`: the tasks of a state, and behind the shards of a `ShardedStream` a task of sums."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from redrb.stream.task.ledger import StreamStats
from redrb.watch.state.model import ConsumerGroupState, TaskState


def with_sums(tasks: Iterable[TaskState]) -> Iterator[TaskState]:
    """Yield tasks, which are in the order of their names, and `math@*` behind `math@0` and so on.

    A sum counts the first consumer group in all shards that can be read.
    """
    for name, alike in groupby(tasks, lambda task: re.sub(r"@[0-9]+\Z", "@*", task.name)):
        shards = list(alike)
        yield from shards
        mains = [shard.main for shard in shards if shard.main is not None]
        if len(shards) > 1 and mains:
            stats = StreamStats.summed([main.stats for main in mains])
            yield TaskState(
                name,
                order=shards[0].order,
                groups=(ConsumerGroupState(mains[0].name, stats),),
                stored_bytes=sum(shard.stored_bytes for shard in shards),
            )
