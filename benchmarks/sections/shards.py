"""One stream in shards on more and more nodes: the processor time of each node.

One process puts and takes, so that at any time one server works. With more servers on a machine of
few cores each of them finds its caches cold, which costs time without shards, too: the control is
as many tasks, one on each node, put to and taken from in turn.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from redis.crc import key_slot

import redrb
from benchmarks.cluster import SLOTS, Cluster, private_cluster
from benchmarks.options import Options
from benchmarks.shapes import SHAPES
from redrb import ExperienceStream, ShardedStream
from redrb.connection import Client
from redrb.experience import BufferItem
from redrb.keys import TaskKeys

SHAPE = "rlhf-1k"
SHARDS = 12
NODES = (1, 3, 6)
SIZES = ((1, 32), (16, 256))
"""Groups of a put and of a take."""

Groups = list[list[BufferItem]]
AnyStream = ExperienceStream | ShardedStream
Open = Callable[[Client, str], Sequence[AnyStream]]


def run(options: Options) -> dict[str, Any]:
    """Return the processor time of a group on each node, in shards and as separate tasks."""
    shape = SHAPES[SHAPE]
    groups = shape.items(shape.distinct_groups)
    with ExitStack() as scope:
        cases: dict[str, tuple[Cluster, Open]] = {}
        for nodes in NODES:
            cluster = scope.enter_context(private_cluster(options.server, nodes))
            cases[f"nodes={nodes}"] = (cluster, _in_shards)
            cases[f"nodes={nodes}, separate tasks"] = (cluster, _separate(nodes))
        return {
            "server": cluster.nodes[0].name,
            "shape": SHAPE,
            "shards": SHARDS,
            "sizes": {
                f"puts of {put}, takes of {take}": _race(cases, put, take, groups, options)
                for put, take in SIZES[: 1 if options.quick else 2]
            },
        }


def _in_shards(client: Client, namespace: str) -> list[ShardedStream]:
    return [ShardedStream(client, "math", shards=SHARDS, namespace=namespace)]


def _separate(nodes: int) -> Open:
    def open_all(client: Client, namespace: str) -> list[ExperienceStream]:
        names: dict[int, str] = {}
        for number in itertools.count():
            key = TaskKeys.of(namespace, f"math{number}").stream
            names.setdefault(key_slot(key.encode()) * nodes // SLOTS, f"math{number}")
            if len(names) == nodes:
                return [
                    ExperienceStream(client, name, namespace=namespace) for name in names.values()
                ]
        raise AssertionError("unreachable")

    return open_all


def _race(
    cases: dict[str, tuple[Cluster, Open]],
    put: int,
    take: int,
    groups: Groups,
    options: Options,
) -> dict[str, dict[str, Any]]:
    """Let the cases alternate; returns the us of a group, medians of the rounds."""
    rounds: dict[str, list[list[float]]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, (cluster, open_all) in cases.items():
            rounds[name].append(_round(cluster, open_all, put, take, groups, options.round_s))
    found = {name: _summary(each) for name, each in rounds.items()}
    for name, figures in found.items():
        one = found[name.replace(name.split(",")[0], "nodes=1")]
        figures["busiest_over_one_node"] = round(figures["busiest_us"] / one["busiest_us"], 3)
    return found


def _summary(rounds: list[list[float]]) -> dict[str, Any]:
    busiest = [max(nodes) for nodes in rounds]
    return {
        "busiest_us": round(median(busiest), 1),
        "all_us": round(median(map(sum, rounds)), 1),
        "busiest_rounds_us": [round(each, 1) for each in busiest],
    }


def _round(
    cluster: Cluster, open_all: Open, put: int, take: int, groups: Groups, seconds: float
) -> list[float]:
    """Put and take for some seconds; returns the us of a group of each node."""
    with redrb.connect(cluster.url) as client, ExitStack() as scope:
        streams = open_all(client, uuid.uuid4().hex)
        for stream in streams:
            scope.enter_context(stream)
        _some(streams, put, take, groups)  # scripts are loaded, connections are open
        before, count, until = cluster.processor_s(), 0, time.monotonic() + seconds
        while time.monotonic() < until:
            count += _some(streams, put, take, groups)
        after = cluster.processor_s()
        for stream in streams:
            parts = stream.shards.values() if isinstance(stream, ShardedStream) else [stream]
            for part in parts:
                part.clear()
    return [1e6 * (end - start) / count for start, end in zip(before, after, strict=True)]


def _some(streams: Sequence[AnyStream], put: int, take: int, groups: Groups) -> int:
    """Put batches and take them all, of each stream in turn; returns the number of groups."""
    batches = max(12, len(streams))
    for number in range(batches * take // put):
        first = number * put % (len(groups) - put + 1)
        stream = streams[number % len(streams)]
        stream.put_many(groups[first : first + put], policy_version=1)
    for number in range(batches):
        streams[number % len(streams)].take(take, timeout=60).ack()
    return batches * take
