"""Memory of a server for groups and weights, beside the formula of docs/how-to/size-a-redis.md.

`python -m benchmarks.memory` starts a server for each case, fills it, and prints `used_memory` of
INFO (for weights: its highest value) without that of the empty server, and what the formula says.
"""

from __future__ import annotations

import argparse
import json

import redis
import torch

import redrb
from benchmarks.machine import machine
from benchmarks.server import private_server
from benchmarks.shapes import SHAPES
from benchmarks.weights_state import Changing, large_model, state_bytes
from redrb.weights.publishing.publisher import lay_out
from redrb.weights.tensors.state import StateBytes
from redrb.weights.wire.layout import CHUNK_BYTES

PER_GROUP = 1_000
"""Bytes of a group besides its content: its entry, its facts, its place in the order."""

MARGIN = 1.2
"""The server's allocator rounds sizes up."""

VERSIONS = 27
"""So many versions need most memory: the second full version, and one after it."""


def formula(groups: int = 0, group: float = 0, full: float = 0, delta: float = 0) -> float:
    """Return the bytes of groups of so many bytes, and of weights with `keep=2`."""
    return MARGIN * (groups * (group + PER_GROUP) + 3 * full + 26 * delta)


def used(url: str, field: str = "used_memory") -> int:
    """Return a field of INFO memory."""
    with redis.Redis.from_url(url) as client:
        return int(client.info("memory")[field])


def groups(name: str, megabytes: int, server: str | None) -> dict[str, float]:
    """Put groups of a shape, as many as have so many megabytes."""
    shape = SHAPES[name]
    made = shape.items(min(32, shape.distinct_groups))
    with private_server(server) as running, redrb.connect(running.url) as client:
        stream = redrb.ExperienceStream(client, "task")
        stream.put_many(made, policy_version=1)
        before, small = used(running.url), stream.stats().bytes_put
        count = max(1, int(megabytes * 1e6 * len(made) // small))
        for start in range(0, count, len(made)):
            stream.put_many(made[: count - start], policy_version=1)
        mean = (stream.stats().bytes_put - small) / count
        return case(count, mean, used(running.url) - before, formula(count, mean))


def weights(kind: str, megabytes: int, server: str | None) -> dict[str, float]:
    """Publish versions.

    "full" sends each in full, "deltas" only what has changed; in "killed" the trainer was killed
    while it sent its first version again, and the next trainer sends it once more.
    """
    model = large_model(megabytes)
    changing, full = Changing(model), state_bytes(model)
    sizes = [0]
    with private_server(server) as running, redrb.connect(running.url) as client:
        before = used(running.url)
        publisher = redrb.WeightPublisher(client, "policy", deltas=kind != "full")
        for _ in range(5 if kind == "full" else VERSIONS):
            sizes.append(publisher.publish(changing.next()).delta_bytes or 0)
        if kind == "killed":
            committer = redrb.WeightPublisher(client, "policy")._committer
            state = StateBytes(lay_out(model.state_dict(), CHUNK_BYTES), model.state_dict())
            committer.begin(None, state).upload(None, whole=True)
            redrb.WeightPublisher(client, "policy").publish(changing.next())
        peak = used(running.url, "used_memory_peak") - before
        return case(1, full, peak, formula(full=full, delta=max(sizes)))


def case(count: int, size: float, measured: int, expected: float) -> dict[str, float]:
    """Return one line of the result."""
    return {
        "count": count,
        "mean_bytes": round(size),
        "measured_mb": round(measured / 1e6, 1),
        "formula_mb": round(expected / 1e6, 1),
        "measured_over_formula": round(measured / expected, 3),
    }


def main() -> None:
    """Measure all cases, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=50, help="size of each case")
    parser.add_argument("--server", help="path of a redis-server; default: the one on PATH")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(json.dumps(machine()))
    for name in SHAPES:
        figures = groups(name, options.megabytes, options.server)
        print(json.dumps({"shape": name, **figures}), flush=True)
    for kind in ("full", "deltas", "killed"):
        figures = weights(kind, options.megabytes, options.server)
        print(json.dumps({"weights": kind, **figures}), flush=True)


if __name__ == "__main__":
    main()
