"""PipelineRL's way: a pickled rollout group an XADD, read one by one with XREAD.

The commands are those of `RedisStreamWriter` and `RedisStreamReader` in `pipelinerl/streams.py` of
ServiceNow/PipelineRL, commit 0c810be: every write and every read is a round trip of its own, and
nothing is deleted. A group is an entry, as PipelineRL's actor writes it. Arrays go through pickle
as NumPy's, which is ten times faster than torch's tensors or PipelineRL's lists of numbers.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import redis
import torch

from benchmarks.systems.job import TIMEOUT_S, Job
from benchmarks.systems.rows import Row, connected, consume_groups, distinct_groups, repeated

BLOCK_MS = 100
MOST_ENTRIES = 1_000_000


def produce(job: Job) -> None:
    """Write each group as an entry."""
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
    with connected(job) as client:
        consume_groups(job, partial(next, _read(client, job.key)))


def _read(client: redis.Redis, key: str) -> Iterator[list[Row]]:
    """Yield the samples of each entry, from the first on."""
    last = b"0"
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        reply: Any = client.xread({key: last}, count=1, block=BLOCK_MS)
        if reply:
            last, entry = reply[0][1][0]
            yield [
                {name: torch.from_numpy(array) for name, array in row.items()}
                for row in pickle.loads(entry[b"data"])
            ]
            deadline = time.monotonic() + TIMEOUT_S
    raise TimeoutError(f"no entry within {TIMEOUT_S} s")


def version() -> str:
    """Name the commit that this follows, and the client's version."""
    return f"streams.py of PipelineRL 0c810be, redis-py {redis.__version__}"
