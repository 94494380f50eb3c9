"""Samples a second from a producer process to a consumer process, against raw redis-py.

Both start from the same tensors. redrb encodes, leases, decodes to a padded batch and acknowledges.
The floor is redis-py alone: a producer adds each tensor's bytes as a field with pipelined XADD, a
consumer reads 32 entries with XREADGROUP, then XACK and XDEL, and decodes nothing.

Two stricter floors run beside it: `ready` is given the bytes ready-made, and `joined` also has all
tensors of a sample in one value, which nobody could take apart. Rounds of all alternate on one
server; the figures are medians.
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
from redrb.experience.records import named_tensors

DISTINCT = 256
TIMEOUT_S = 120


def redrb_producer(
    url: str,
    key: str,
    workload: Workload,
    count: int,
    *,
    barrier: Barrier,
    finished: Event,
    order: str | None = None,
) -> None:
    torch.set_num_threads(1)
    made = workload.items(DISTINCT)
    batches = [
        redrb.make_experience_batch(made[start : start + workload.batch])
        for start in range(0, DISTINCT, workload.batch)
    ]
    with redrb.connect(url) as client, redrb.ExperienceStream(client, key, order=order) as stream:
        barrier.wait(TIMEOUT_S)
        with stream.writer() as writer:
            for number in range(count // workload.batch):
                writer.put(batches[number % len(batches)])  # one group a row


def redrb_consumer(
    url: str, key: str, workload: Workload, count: int, *, barrier: Barrier, finished: Event
) -> None:
    torch.set_num_threads(1)
    with redrb.connect(url) as client, redrb.ExperienceStream(client, key) as stream:
        stream.join_group()
        barrier.wait(TIMEOUT_S)
        leases = stream.leases(workload.batch, timeout=TIMEOUT_S)
        for _ in range(0, count, workload.batch):
            lease = next(leases)  # acknowledges the one before
            batch = lease.batch()
            assert batch.sequences is not None
            assert batch.sequences.shape == (workload.batch, workload.sequence)
        lease.ack()
        finished.set()
        leases.close()


def floor_producer(
    url: str, key: str, workload: Workload, count: int, *, barrier: Barrier, finished: Event
) -> None:
    torch.set_num_threads(1)
    items = workload.items(DISTINCT)
    _add_all(url, key, workload, count, lambda index: _fields(items[index]), barrier)


def ready_producer(
    url: str, key: str, workload: Workload, count: int, *, barrier: Barrier, finished: Event
) -> None:
    entries = [_fields(item) for item in workload.items(DISTINCT)]
    _add_all(url, key, workload, count, entries.__getitem__, barrier)


def joined_producer(
    url: str, key: str, workload: Workload, count: int, *, barrier: Barrier, finished: Event
) -> None:
    entries = [{"all": raw_bytes(item)} for item in workload.items(DISTINCT)]
    _add_all(url, key, workload, count, entries.__getitem__, barrier)


def _fields(item: redrb.BufferItem) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in named_tensors(item).items()}


def _add_all(
    url: str,
    key: str,
    workload: Workload,
    count: int,
    entry: Callable[[int], dict[str, bytes]],
    barrier: Barrier,
) -> None:
    client = redis.Redis.from_url(url)
    barrier.wait(TIMEOUT_S)
    for start in range(0, count, workload.batch):
        pipeline = client.pipeline(transaction=False)
        for index in range(start, start + workload.batch):
            pipeline.xadd(key, entry(index % DISTINCT))  # type: ignore[arg-type]
        pipeline.execute()


def floor_consumer(
    url: str, key: str, workload: Workload, count: int, *, barrier: Barrier, finished: Event
) -> None:
    client = redis.Redis.from_url(url)
    client.xgroup_create(key, "g", "0", mkstream=True)
    barrier.wait(TIMEOUT_S)
    for _ in range(0, count, workload.batch):
        ids: list[bytes] = []
        while len(ids) < workload.batch:
            wanted = workload.batch - len(ids)
            reply: Any = client.xreadgroup("g", "c", {key: ">"}, count=wanted, block=1000)
            ids += [entry[0] for entry in reply[0][1]] if reply else []
        pipeline = client.pipeline(transaction=False)
        pipeline.xack(key, "g", *ids)
        pipeline.xdel(key, *ids)
        pipeline.execute()
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
    rates: dict[str, list[float]] = {"redrb": [], "floor": [], "ready": [], "joined": []}
    sides = {
        "floor": (floor_producer, floor_consumer),
        "redrb": (redrb_producer, redrb_consumer),
        "ready": (ready_producer, floor_consumer),
        "joined": (joined_producer, floor_consumer),
    }
    with private_server(options.server) as (url, version):
        print(f"{workload.name}: {len(raw_bytes(item))} raw bytes a sample, {version}")
        for number in range(1, options.rounds + 1):
            for name, (producer, consumer) in sides.items():
                rates[name].append(measure(url, workload, options.samples, producer, consumer))
            shown = "  ".join(f"{name} {rates[name][-1]:7.0f}" for name in rates)
            print(f"round {number}: {shown} samples/s", flush=True)
    median = {name: statistics.median(values) for name, values in rates.items()}
    result = {
        "workload": workload.name,
        "samples_per_second": round(median["redrb"]),
        "floor_samples_per_second": round(median["floor"]),
        "ratio_floor": round(median["redrb"] / median["floor"], 3),
        "ratio_ready": round(median["redrb"] / median["ready"], 3),
        "ratio_joined": round(median["redrb"] / median["joined"], 3),
    }
    print(
        f"redrb {median['redrb']:.0f} samples/s: {result['ratio_floor']} of raw redis-py from "
        f"tensors ({median['floor']:.0f}), {result['ratio_ready']} of it from ready-made bytes "
        f"({median['ready']:.0f}), {result['ratio_joined']} from joined ones "
        f"({median['joined']:.0f})"
    )
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
