"""TransferQueue: its client's `put`, `get_meta` and `get_data` on its SimpleStorage.

Samples of unequal lengths go as jagged nested tensors, its form for them, and a taken batch is
padded. The controller answers at once where too few samples wait (`polling_mode`, which its
streaming loader asks for), as it otherwise looks again only after 5 s; the consumer asks again
after a millisecond. The partition is cleared when the clock has stopped: to clear the rows of
each batch would take a fifth of the throughput.
"""

from __future__ import annotations

import os
import time
from importlib.metadata import version as installed
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.systems import ray_cluster
from benchmarks.systems.job import TIMEOUT_S, Job
from benchmarks.systems.rows import (
    Row,
    check_full,
    connected,
    distinct_puts,
    repeated,
)

ASK_AGAIN_S = 0.001
TASK = "train"


def produce(job: Job) -> None:
    """Put the samples of each put as rows."""
    with connected(job) as client:
        ray_cluster.join(client, job)
        queue = _queue(polling=False)
        from tensordict import TensorDict

        puts = [TensorDict(_columns(rows), [len(rows)]) for rows in distinct_puts(job.shape)]
        job.start()
        for put in repeated(puts, job.groups // job.shape.put_groups):
            queue.put(data=put, partition_id=job.key)
        job.finish()


def consume(job: Job) -> None:
    """Take batches of rows, and pad them."""
    size = job.shape.take_samples
    fields = list(distinct_puts(job.shape)[0][0])
    with connected(job) as client:
        ray_cluster.start()
        queue = _queue(polling=True)
        ray_cluster.invite(client, job)
        job.start()
        for _ in range(0, job.groups, job.shape.take_groups):
            rows = _next(queue, job, fields, size)
            batch = {name: _padded(tensor) for name, tensor in queue.get_data(rows).items()}
            check_full(batch, size)
        job.finish()
        queue.clear_partition(job.key)


def version() -> str:
    """Name the versions of TransferQueue and of Ray, which runs its actors."""
    return f"TransferQueue {installed('TransferQueue')}, ray {installed('ray')}"


def _queue(*, polling: bool) -> Any:
    """Return this process's client; the first process starts the controller and the storage."""
    os.environ.setdefault("TQ_NUM_THREADS", "1")
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
    import transfer_queue
    from omegaconf import OmegaConf

    transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": polling}}))
    return transfer_queue.get_client()


def _next(queue: Any, job: Job, fields: list[str], size: int) -> Any:
    """Wait for `size` rows that nobody took; returns their metadata."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        rows = queue.get_meta(
            data_fields=fields, batch_size=size, partition_id=job.key, task_name=TASK
        )
        if rows.size:
            return rows
        time.sleep(ASK_AGAIN_S)
    raise TimeoutError(f"no {size} samples within {TIMEOUT_S} s")


def _columns(rows: list[Row]) -> Row:
    """Return a column a field: nested where lengths differ."""
    return {name: _column([row[name] for row in rows]) for name in rows[0]}


def _column(tensors: list[Tensor]) -> Tensor:
    if all(tensor.shape == tensors[0].shape for tensor in tensors):
        return torch.stack(tensors)
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def _padded(column: Any) -> Tensor:
    """Return a column as a dense tensor, padded on the left."""
    if not column.is_nested:
        dense: Tensor = column
        return dense
    lengths = column.offsets().diff().tolist()
    values: Tensor = column.values()
    if min(lengths) == max(lengths):
        return values.view(len(lengths), lengths[0], *values.shape[1:])
    return pad_sequence(list(torch.split(values, lengths)), batch_first=True, padding_side="left")
