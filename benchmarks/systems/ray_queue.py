"""Ray's queue as ColossalAI's `DetachedReplayBuffer` uses it: three hops between processes.

As in `coati/ray` of hpcaitech/ColossalAI, a maker calls the trainer's actor with each put:
`buffer_append` with a batch, or `buffer_extend` with samples where their lengths differ. The buffer
there collects the samples of a take, pads them, and puts the batch into a `ray.util.queue.Queue`,
an actor of its own, from which the trainer takes it. Ray's zero-copy tensors are on, as they save
processor time. The consumer's processor time is that of the trainer's actor.
"""

from __future__ import annotations

import time
from collections import deque
from importlib.metadata import version as installed
from typing import Any

import torch

from benchmarks.systems import ray_cluster
from benchmarks.systems.job import TIMEOUT_S, Job
from benchmarks.systems.rows import Row, check_full, connected, distinct_puts, padded, repeated

QUEUED_BATCHES = 64
"""Batches that the queue holds; the buffer waits while it is full."""

UNFINISHED_PUTS = 16
"""Remote calls of a maker that may be unfinished, unless it puts one sample at a time."""

NAME = "trainer"


class Trainer:
    """The trainer's actor with its buffer, whose calls run in a thread of their own."""

    def __init__(self) -> None:
        from ray.util.queue import Queue

        torch.set_num_threads(1)
        self._take_samples = 0
        self._queue = Queue(QUEUED_BATCHES, actor_options={"num_cpus": 0})
        self._collected: list[Row] = []
        self._queue.put({"": torch.zeros(1)})  # starts the queue's actor, which imports torch
        self._queue.get()

    def prepare(self, take_samples: int) -> None:
        """Begin a round."""
        self._take_samples = take_samples

    def append(self, batch: Row) -> None:
        """Collect the samples of a batch of equal lengths."""
        columns = [tensor.unbind() for tensor in batch.values()]
        self.extend([dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)])

    def extend(self, rows: list[Row]) -> None:
        """Collect samples, and queue the batches that they complete."""
        self._collected += rows
        while len(self._collected) >= self._take_samples:
            self._queue.put(padded(self._collected[: self._take_samples]), timeout=TIMEOUT_S)
            self._collected = self._collected[self._take_samples :]

    def fit(self, batches: int) -> float:
        """Take batches; returns the seconds of the actor's processor time meanwhile."""
        began = time.process_time()
        for _ in range(batches):
            check_full(self._queue.get(timeout=TIMEOUT_S), self._take_samples)
        return time.process_time() - began


def produce(job: Job) -> None:
    """Call the trainer's actor with each put."""
    puts: list[Any] = distinct_puts(job.shape)
    if not job.shape.lengths_vary:
        puts = [padded(rows) for rows in puts]
    unfinished = 1 if job.shape.one_at_a_time else UNFINISHED_PUTS
    with connected(job) as client:
        ray = ray_cluster.join(client, job)
        trainer = ray.get_actor(NAME, namespace=NAME)
        call = trainer.extend if job.shape.lengths_vary else trainer.append
        send = call.options(concurrency_group="buffer").remote
        job.start()
        sent: deque[Any] = deque()
        for put in repeated(puts, job.groups // job.shape.put_groups):
            sent.append(send(put))
            if len(sent) == unfinished:
                ray.get(sent.popleft(), timeout=TIMEOUT_S)
        ray.get(list(sent), timeout=TIMEOUT_S)
        job.finish()


def consume(job: Job) -> None:
    """Start the cluster and the trainer's actor once, and let it take all batches."""
    shape = job.shape
    with connected(job) as client:
        ray = ray_cluster.start()
        actor = ray.remote(concurrency_groups={"buffer": 1})(Trainer)
        trainer = actor.options(
            name=NAME, namespace=NAME, get_if_exists=True, lifetime="detached", num_cpus=0
        ).remote()
        ray.get(trainer.prepare.remote(shape.take_samples), timeout=TIMEOUT_S)
        ray_cluster.invite(client, job)
        job.start()
        fitted = trainer.fit.remote(job.groups // shape.take_groups)
        spent: float = ray.get(fitted, timeout=TIMEOUT_S)
        job.finish()
        job.processor_s += spent


def version() -> str:
    """Name Ray's version."""
    return f"ray {installed('ray')}"
