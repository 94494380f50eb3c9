"""Entries through a Redis stream with redis-py alone: the part that all floors share."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, TypeAlias

import redis

from benchmarks.systems.job import Job

Entry: TypeAlias = dict[Any, Any]
"""Fields and their bytes, typed as redis-py wants them."""

GROUP = "g"
BLOCK_MS = 1_000


def add_all(job: Job, entries: int, entry: Callable[[int], Entry], *, pipelined: int) -> None:
    """Add entries with XADD, `pipelined` of them a round trip; `entry` makes each from its number.

    An entry a round trip is sent without a pipeline.
    """
    client = redis.Redis.from_url(job.url)
    client.ping()  # connects
    job.start()
    if pipelined == 1:
        for number in range(entries):
            client.xadd(job.key, entry(number))
    else:
        for start in range(0, entries, pipelined):
            pipeline = client.pipeline(transaction=False)
            for number in range(start, start + pipelined):
                pipeline.xadd(job.key, entry(number))
            pipeline.execute()
    job.finish()
    client.close()


def read_all(job: Job, entries: int, *, batch: int) -> None:
    """Read batches of entries with XREADGROUP, then XACK and XDEL them; decode nothing."""
    client = redis.Redis.from_url(job.url)
    try:
        client.xgroup_create(job.key, GROUP, "0", mkstream=True)
    except redis.ResponseError as error:
        if "BUSYGROUP" not in str(error):
            raise
    name = uuid.uuid4().hex
    job.start()
    for _ in range(0, entries, batch):
        ids: list[bytes] = []
        while len(ids) < batch:
            reply: Any = client.xreadgroup(
                GROUP, name, {job.key: ">"}, count=batch - len(ids), block=BLOCK_MS
            )
            ids += [entry[0] for entry in reply[0][1]] if reply else []
        pipeline = client.pipeline(transaction=False)
        pipeline.xack(job.key, GROUP, *ids)
        pipeline.xdel(job.key, *ids)
        pipeline.execute()
    job.finish()
    client.close()


def version() -> str:
    """Name redis-py's version."""
    return f"redis-py {redis.__version__}"
