"""torchrl: `StoreStorage` on Redis, written and read in slices.

A `StoreStorage` keeps a field of all samples in one Redis string, so that a slice of samples is one
SETRANGE or GETRANGE a field, its fastest access. All rows of a field have one shape: samples of
unequal lengths are padded to the longest of the shape before the clock starts, and a taken batch is
cut to its own longest sample. The storage does not know which rows were written and not yet read:
one Redis list hands free rows to the producers, another hands written rows to the consumers.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version as installed
from typing import Any

import redis
import torch
from tensordict import TensorDict
from tensordict.store import TensorDictStore
from torch.nn.functional import pad
from torchrl.data.replay_buffers import StoreStorage

from benchmarks.shapes import Shape
from benchmarks.systems.job import TIMEOUT_S, Job
from benchmarks.systems.rows import (
    Row,
    check_full,
    connected,
    distinct_puts,
    padded,
    repeated,
)

FIELD_BYTES = 128 << 20
"""Bytes of the string of the largest field; Redis allows 512 MB."""

FREE_AT_ONCE = 8
"""Free places that a producer takes at a time."""


def produce(job: Job) -> None:
    """Write each put to free rows."""
    puts = _fixed_puts(job.shape)
    size = len(puts[0])
    with connected(job) as client:
        capacity = _capacity(job.shape, puts[0])
        storage = StoreStorage(capacity, td_id=job.key, **_address(client))
        storage.set(slice(0, size), puts[0])  # connects, and allocates the strings
        if client.set(f"{job.key}:places", capacity, nx=True):
            client.rpush(f"{job.key}:free", *range(0, capacity, size))
        job.start()
        free = _popped(client, f"{job.key}:free", FREE_AT_ONCE)
        for put in repeated(puts, job.groups // job.shape.put_groups):
            start = next(free)
            storage.set(slice(start, start + size), put)
            client.rpush(f"{job.key}:written", start)
        job.finish()


def consume(job: Job) -> None:
    """Read the rows of each take, and free them."""
    shape = job.shape
    puts = _fixed_puts(shape)
    size, count = len(puts[0]), shape.take_groups // shape.put_groups
    with connected(job) as client:
        store = TensorDictStore(
            batch_size=[_capacity(shape, puts[0])], td_id=job.key, **_address(client)
        )
        job.start()
        written = _popped(client, f"{job.key}:written", count)
        for _ in range(0, job.groups, shape.take_groups):
            starts = [next(written) for _ in range(count)]
            batch = dict(store[_index(starts, size)].items())
            client.rpush(f"{job.key}:free", *starts)
            check_full(_cut(batch) if shape.lengths_vary else batch, shape.take_samples)
        job.finish()


def version() -> str:
    """Name the versions of torchrl and of tensordict, which has the store."""
    return f"torchrl {installed('torchrl')}, tensordict {installed('tensordict')}"


def _fixed_puts(shape: Shape) -> list[TensorDict]:
    """Return the distinct puts, padded on the left to the longest sample of all."""
    batches = [padded(rows) for rows in distinct_puts(shape)]
    for name in batches[0]:
        longest = max(batch[name][0].numel() for batch in batches)
        for batch in batches:
            if batch[name].dim() == 2:
                batch[name] = pad(batch[name], (longest - batch[name].shape[1], 0))
    return [TensorDict(batch, [len(batch["reward"])]) for batch in batches]


def _capacity(shape: Shape, put: TensorDict) -> int:
    """Return the rows of the storage: a whole number of takes, and at least two."""
    row_bytes: int = max(tensor.nbytes // len(put) for tensor in put.values())
    takes = min(
        shape.round_groups // shape.take_groups, FIELD_BYTES // row_bytes // shape.take_samples
    )
    return max(2, takes) * shape.take_samples


def _index(starts: list[int], size: int) -> slice | torch.Tensor:
    """Return the rows of the places: a slice if they follow each other."""
    if starts == list(range(starts[0], starts[0] + len(starts) * size, size)):
        return slice(starts[0], starts[-1] + size)
    return torch.cat([torch.arange(start, start + size) for start in starts])


def _cut(batch: Row) -> Row:
    """Cut the padding on the left that no sample of the batch needs."""
    longest = {
        batch[mask].shape[1]: int(batch[mask].any(0).sum())
        for mask in ("attention_mask", "action_mask")
    }
    return {
        name: tensor[:, -longest[tensor.shape[1]] :] if tensor.dim() == 2 else tensor
        for name, tensor in batch.items()
    }


def _popped(client: redis.Redis, key: str, count: int) -> Iterator[int]:
    """Yield numbers from a list, up to `count` a command; waits for each."""
    while True:
        reply: Any = client.blmpop(TIMEOUT_S, 1, key, direction="LEFT", count=count)
        if reply is None:
            raise TimeoutError(f"nothing in {key} within {TIMEOUT_S} s")
        yield from map(int, reply[1])


def _address(client: redis.Redis) -> dict[str, Any]:
    """Return the options of a store for the server that `client` is connected to."""
    options = client.connection_pool.connection_kwargs
    if "path" in options:
        return {"unix_socket_path": options["path"]}
    return {"host": options["host"], "port": options["port"]}
