"""Samples a second from a producer process to a consumer process, against a raw redis-py floor.

The floor moves the same raw bytes: pipelined XADD of one joined value, XREADGROUP, XACK and XDEL,
and decodes nothing. redrb encodes, leases, decodes to a padded batch and acknowledges. Rounds of
both alternate on one server; the figures are medians.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
import uuid
from collections.abc import Callable
from multiprocessing.synchronize import Barrier, Event
from typing import Any

import redis
import torch

import redrb
from benchmarks.server import private_server
from benchmarks.workloads import WORKLOADS, Workload, raw_bytes

DISTINCT = 256
TIMEOUT_S = 120


def redrb_producer(
    url: str, key: str, workload: Workload, count: int, *, barrier: Barrier, finished: Event
) -> None:
    torch.set_num_threads(1)
    items = workload.items(DISTINCT)
    with redrb.connect(url) as client, redrb.ExperienceStream(client, key) as stream:
        barrier.wait(TIMEOUT_S)
        for start in range(0, count, workload.batch):
            batch = range(start, start + workload.batch)
            stream.put_many([[items[index % DISTINCT]] for index in batch])


def redrb_consumer(
    url: str, key: str, workload: Workload, count: int, *, barrier: Barrier, finished: Event
) -> None:
    torch.set_num_threads(1)
    with redrb.connect(url) as client, redrb.ExperienceStream(client, key) as stream:
        stream.join_group()
        barrier.wait(TIMEOUT_S)
        for _ in range(0, count, workload.batch):
            lease = stream.take(workload.batch, timeout=TIMEOUT_S)
            batch = lease.batch()
            assert batch.sequences is not None
            assert batch.sequences.shape == (workload.batch, workload.sequence)
            lease.ack()
        finished.set()


def floor_producer(
    url: str, key: str, workload: Workload, count: int, *, barrier: Barrier, finished: Event
) -> None:
    payloads = [raw_bytes(item) for item in workload.items(DISTINCT)]
    client = redis.Redis.from_url(url)
    barrier.wait(TIMEOUT_S)
    for start in range(0, count, workload.batch):
        pipeline = client.pipeline(transaction=False)
        for index in range(start, start + workload.batch):
            pipeline.xadd(key, {"d": payloads[index % DISTINCT]})
        pipeline.execute()


def floor_consumer(
    url: str, key: str, workload: Workload, count: int, *, barrier: Barrier, finished: Event
) -> None:
    client = redis.Redis.from_url(url)
    client.xgroup_create(key, "g", "0", mkstream=True)
    barrier.wait(TIMEOUT_S)
    seen = 0
    while seen < count:
        reply: Any = client.xreadgroup("g", "c", {key: ">"}, count=workload.batch, block=1000)
        if reply:
            ids = [entry[0] for entry in reply[0][1]]
            pipeline = client.pipeline(transaction=False)
            pipeline.xack(key, "g", *ids)
            pipeline.xdel(key, *ids)
            pipeline.execute()
            seen += len(ids)
    finished.set()


def measure(
    url: str,
    workload: Workload,
    count: int,
    producer: Callable[..., None],
    consumer: Callable[..., None],
) -> float:
    """Return samples a second from the common start to the last acknowledgement."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    finished = context.Event()
    arguments = (url, f"bench-{uuid.uuid4().hex}", workload, count)
    signals = {"barrier": barrier, "finished": finished}
    processes = [
        context.Process(target=side, args=arguments, kwargs=signals)
        for side in (consumer, producer)
    ]
    for process in processes:
        process.start()
    barrier.wait(TIMEOUT_S)
    started = time.perf_counter()
    done = finished.wait(TIMEOUT_S)
    seconds = time.perf_counter() - started
    for process in processes:
        process.join(TIMEOUT_S if done else 1)
        if process.exitcode != 0:
            process.kill()
            raise SystemExit("a benchmark process failed")
    return count / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="rlhf-1k")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds of each side")
    parser.add_argument("--samples", type=int, default=32_768, help="samples a round")
    parser.add_argument("--server", help="path of a redis-server; default: the one on PATH")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    workload = WORKLOADS[options.workload]
    item = workload.items(1)[0]
    own: list[float] = []
    floor: list[float] = []
    with private_server(options.server) as (url, version):
        print(f"{workload.name}: {len(raw_bytes(item))} raw bytes a sample, {version}")
        for number in range(1, options.rounds + 1):
            floor.append(measure(url, workload, options.samples, floor_producer, floor_consumer))
            own.append(measure(url, workload, options.samples, redrb_producer, redrb_consumer))
            print(
                f"round {number}: redrb {own[-1]:8.0f}  floor {floor[-1]:8.0f} samples/s"
                f"  ratio {own[-1] / floor[-1]:.2f}",
                flush=True,
            )
    result = {
        "workload": workload.name,
        "samples_per_second": round(statistics.median(own)),
        "floor_samples_per_second": round(statistics.median(floor)),
        "ratio_floor": round(statistics.median(own) / statistics.median(floor), 3),
    }
    print(
        f"median: redrb {result['samples_per_second']}, raw redis-py floor "
        f"{result['floor_samples_per_second']} samples/s, ratio {result['ratio_floor']}"
    )
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
