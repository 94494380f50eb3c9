"""PipelineRL's way: a pickled rollout group an XADD, read one by one with XREAD.

The commands are those of `RedisStreamWriter` and `RedisStreamReader` in `pipelinerl/streams.py` of
ServiceNow/PipelineRL, commit 0c810be: every write and every read is a round trip of its own, and
nothing is deleted. A group is an entry, as PipelineRL's actor writes it. Arrays go through pickle
as NumPy's, which is ten times faster than torch's tensors or PipelineRL's lists of numbers.
"""

from __future__ import annotations

import pickle
import time
from typing import Any

import redis
import torch

from benchmarks.systems.job import TIMEOUT_S, Job
from benchmarks.systems.rows import (
    Row,
    check_full,
    connected,
    distinct_groups,
    padded,
    repeated,
)

BLOCK_MS = 100
MOST_ENTRIES = 1_000_000


def produce(job: Job) -> None:
    """Write each group as an entry."""
    torch.set_num_threads(1)
    groups = [
        [{name: tensor.numpy() for name, tensor in row.items()} for row in group]
        for group in distinct_groups(job.shape)
    ]
    with connected(job) as client:
        job.start()
        for group in repeated(groups, job.groups):
            entry: Any = {"data": pickle.dumps(group)}
            client.xadd(job.key, entry, maxlen=MOST_ENTRIES, approximate=True)
        job.finish()


def consume(job: Job) -> None:
    """Read one group after the other, and pad the batches."""
    torch.set_num_threads(1)
    with connected(job) as client:
        job.start()
        last = b"0"
        for _ in range(0, job.groups, job.shape.take_groups):
            rows: list[Row] = []
            for _ in range(job.shape.take_groups):
                last, group = _next(client, job.key, last)
                rows += group
            check_full(job, padded(rows))
        job.finish()


def _next(client: redis.Redis, key: str, last: bytes) -> tuple[bytes, list[Row]]:
    """Return the id and the samples of the entry behind `last`."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        reply: Any = client.xread({key: last}, count=1, block=BLOCK_MS)
        if reply:
            found, entry = reply[0][1][0]
            return found, [
                {name: torch.from_numpy(array) for name, array in row.items()}
                for row in pickle.loads(entry[b"data"])
            ]
    raise TimeoutError(f"no entry within {TIMEOUT_S} s")


def version() -> str:
    """Name the commit that this follows, and the client's version."""
    return f"streams.py of PipelineRL 0c810be, redis-py {redis.__version__}"
