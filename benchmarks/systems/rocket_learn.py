"""rocket-learn's way: a rollout as msgpack, compressed with zlib, in a Redis list.

The commands are those of `RedisRolloutWorker` and `RedisRolloutGenerator` of
Rolv-Arild/rocket-learn, commit 08423aa: RPUSH of one rollout, BLPOP of one rollout. The worker's
LTRIM is left out, which throws all but 100 rollouts away when 1,000 wait. A group is a rollout.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgpack
import redis
import torch
from torch import Tensor

from benchmarks.systems.job import TIMEOUT_S, Job
from benchmarks.systems.rows import Row, connected, consume_groups, distinct_groups, repeated


def produce(job: Job) -> None:
    """Push each group as a rollout."""
    groups = distinct_groups(job.shape)
    with connected(job) as client:
        job.start()
        for group in repeated(groups, job.groups):
            client.rpush(job.key, zlib.compress(msgpack.packb(group, default=_packed)))
        job.finish()


def consume(job: Job) -> None:
    """Pop one rollout after the other, and pad the batches."""
    with connected(job) as client:

        def pop() -> list[Row]:
            reply: Any = client.blpop([job.key], timeout=TIMEOUT_S)
            if reply is None:
                raise TimeoutError(f"no rollout within {TIMEOUT_S} s")
            rows: list[Row] = msgpack.unpackb(zlib.decompress(reply[1]), object_hook=_unpacked)
            return rows

        consume_groups(job, pop)


def _packed(tensor: Tensor) -> dict[str, Any]:
    """Return a tensor as msgpack-numpy, which rocket-learn uses, packs an array."""
    array = tensor.numpy()
    return {"nd": True, "type": array.dtype.str, "shape": array.shape, "data": array.tobytes()}


def _unpacked(packed: dict[str, Any]) -> Any:
    if "nd" not in packed:
        return packed
    dtype = _DTYPES[packed["type"]]
    return torch.frombuffer(bytearray(packed["data"]), dtype=dtype).view(packed["shape"])


_DTYPES = {
    torch.empty(0, dtype=dtype).numpy().dtype.str: dtype
    for dtype in (torch.int64, torch.float32, torch.bool, torch.uint8)
}


def version() -> str:
    """Name the commit that this follows, and the versions of the libraries."""
    packed = ".".join(map(str, msgpack.version))
    return f"rocket-learn 08423aa, msgpack {packed}, redis-py {redis.__version__}"
