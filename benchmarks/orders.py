"""The cost of orders, in time and memory, against fifo and by the number of waiting groups.

`stalest_over_fifo`: samples a second from a producer process to a consumer process as in
`benchmarks.throughput`, where batches arrive with versions out of order; rounds alternate.

`cost_1m_over_1k`: two tasks of order stalest with max_staleness on one server, one with `--groups`
waiting, one with `--small`. A step is a weight version: 125 groups arrive in puts of 32, 32 stalest
are taken, the other 93 of the oldest version expire, so that as many wait as before. Each call is
timed in turn on both tasks, round trip included; medians.

`expire_speedup`: `expire` that removes a hundredth of the groups, against the work of a store
without an index: read every group with redis-py, 1,000 an XRANGE, and compare the versions in their
headers, in Python. `expire_speedup_facts` is against a scan of the index alone, with hscan_iter
over the hash of facts, `expire_speedup_in_memory` against a walk of as many Python objects, each
with a list of its tokens' versions, in the memory of one process. None of the three removes
anything.

`memory_ratio`: growth of a server's used_memory, over the bytes of the encoded groups, for a
task of order stalest with a consumer group; groups have about 15 KB, by the length of completions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import redis
import torch

import redrb
from benchmarks.server import private_server
from benchmarks.throughput import measure, redrb_consumer, redrb_producer
from benchmarks.workloads import WORKLOADS, Workload
from redrb.codec import parse_groups
from redrb.stream.task.facts import unpack_facts

ORDERS = ("fifo", "stalest")
CALLS = ("put", "take", "count", "expire")
BATCH = 32
VERSION_GROUPS = 125
"""Groups of a weight version; every count of groups is rounded up to a multiple of it."""

MAX_STALENESS = 1_000_000
SMALL_GROUPS = Workload("small", sequence=32, actions=16, batch=BATCH)
LARGE_GROUPS = [
    Workload("15 KB", sequence=256 + actions, actions=actions, batch=BATCH)
    for actions in (740, 780, 820, 860, 900)
]


class ShuffledVersions(Workload):
    """A workload whose batches arrive with versions out of order."""

    def items(self, count: int, seed: int = 0) -> list[redrb.BufferItem]:
        made = super().items(count, seed)
        return [
            replace(item, policy_version=1 + index // self.batch * 5 % 8)
            for index, item in enumerate(made)
        ]


class Waiting:
    """A task in which groups wait, oldest version first."""

    def __init__(self, client: redrb.Client, name: str, workload: Workload = SMALL_GROUPS) -> None:
        self.stream = redrb.ExperienceStream(
            client, name, order="stalest", max_staleness=MAX_STALENESS
        )
        self.stream.join_group()
        made = [replace(item, policy_version=None) for item in workload.items(VERSION_GROUPS)]
        parts = [made[start : start + BATCH] for start in range(0, VERSION_GROUPS, BATCH)]
        self._whole = redrb.make_experience_batch(made)
        self._parts = [redrb.make_experience_batch(part) for part in parts]
        self._oldest = 0
        self._next = 0

    def close(self) -> None:
        self.stream.close()

    @property
    def key(self) -> str:
        return self.stream._task.store.keys.prefix

    def fill(self, groups: int) -> None:
        """Put versions until at least so many groups wait."""
        for _ in range(0, groups, VERSION_GROUPS):
            self.stream.put(self._whole, policy_version=self._next)
            self._next += 1
        self.stream.advance(self._next)

    def put(self) -> list[float]:
        """Put a version."""
        *full, rest = self._parts
        seconds = [
            _timed(partial(self.stream.put, part, policy_version=self._next)) for part in full
        ]
        self.stream.put(rest, policy_version=self._next)
        self._next += 1
        self.stream.advance(self._next)
        return seconds

    def take(self) -> list[float]:
        """Take a batch of the oldest version."""
        started = time.perf_counter()
        lease = self.stream.take(BATCH, timeout=0)
        seconds = time.perf_counter() - started
        lease.ack()
        return [seconds]

    def count(self) -> list[float]:
        return [_timed(self.stream.count)]

    def expire(self) -> list[float]:
        """Expire the remaining groups of the oldest version."""
        return [self.expire_versions(1, VERSION_GROUPS - BATCH)]

    def expire_versions(self, versions: int, groups: int) -> float:
        """Expire the oldest versions, which hold so many groups; returns seconds."""
        self._oldest += versions
        started = time.perf_counter()
        expired = self.stream.expire(self._oldest + MAX_STALENESS)
        seconds = time.perf_counter() - started
        if expired != groups:
            raise SystemExit(f"{expired} groups expired, not {groups}")
        return seconds

    def scan(self, versions: int) -> list[bytes]:
        """Find the groups of the oldest versions in the groups themselves."""
        cut, found, start = self._oldest + versions - 1, [], "-"
        with redis.Redis.from_url(self.stream._task.store.client.url) as client:
            while entries := client.xrange(f"{self.key}stream", start, count=1000):
                for entry, layout in zip(
                    entries, parse_groups(fields[b"g"] for _, fields in entries), strict=True
                ):
                    if isinstance(layout, redrb.errors.DecodeError):
                        raise layout
                    if min(v for v in layout.policy_versions if v is not None) <= cut:
                        found.append(entry[0])
                start = f"({entries[-1][0].decode()}"
        return found

    def scan_facts(self, versions: int) -> list[bytes]:
        """Find them in the hash of facts."""
        cut = self._oldest + versions - 1
        with redis.Redis.from_url(self.stream._task.store.client.url) as client:
            pairs = client.hscan_iter(f"{self.key}facts", count=1000)
            return [member for member, facts in pairs if unpack_facts(facts)["version"] <= cut]


@dataclass(slots=True)
class Record:
    """A rollout in a buffer that lives in one process."""

    token_versions: list[int]
    staleness: int = 0


def walk(records: Sequence[Record], current: int, max_staleness: int) -> int:
    """Bring every record's staleness up to date; returns how many are too stale."""
    overdue = 0
    for record in records:
        record.staleness = current - min(record.token_versions) - 1
        overdue += record.staleness >= max_staleness
    return overdue


def order_rates(server: str | None, rounds: int, samples: int) -> dict[str, float]:
    """Return median samples a second of each order."""
    known = WORKLOADS["rlhf-1k"]
    workload = ShuffledVersions(known.name, known.sequence, known.actions, known.batch)
    rates: dict[str, list[float]] = {order: [] for order in ORDERS}
    with private_server(server) as (url, version):
        print(f"{workload.name}, one process puts and one takes, {version}")
        for number in range(1, rounds + 1):
            for order in ORDERS:
                producer = partial(redrb_producer, order=order)
                rates[order].append(measure(url, workload, samples, producer, redrb_consumer))
            shown = "  ".join(f"{order} {rates[order][-1]:7.0f}" for order in ORDERS)
            print(f"round {number}: {shown} samples/s", flush=True)
    return {order: statistics.median(each) for order, each in rates.items()}


def call_costs(tasks: Sequence[Waiting], repeats: int) -> dict[str, list[float]]:
    """Return the median seconds of each call, on each of the tasks."""
    seconds: dict[str, list[list[float]]] = {call: [[] for _ in tasks] for call in CALLS}
    for number in range(-repeats // 10, repeats):  # the first tenth warms up
        for call in CALLS:
            for index in (0, 1) if number % 2 else (1, 0):
                spent = getattr(tasks[index], call)()
                if number >= 0:
                    seconds[call][index] += spent
    return {call: [statistics.median(each) for each in both] for call, both in seconds.items()}


def expire_costs(task: Waiting, rounds: int) -> tuple[int, float, float, float]:
    """Return how many groups expire at once, and seconds of it, of a scan, and of one of the facts.

    Medians; the scan of the groups takes so long that one round is enough.
    """
    versions = max(1, len(task.stream) // 100 // VERSION_GROUPS)
    groups, expiries, scans = versions * VERSION_GROUPS, [], []
    whole = _timed(partial(task.scan, versions))
    for _ in range(rounds):
        scans.append(_timed(partial(task.scan_facts, versions)))
        expiries.append(task.expire_versions(versions, groups))
        task.fill(groups)
    return groups, statistics.median(expiries), whole, statistics.median(scans)


def walk_cost(groups: int, rounds: int) -> float:
    """Return the median seconds of a walk of records in memory."""
    tokens = SMALL_GROUPS.actions
    records = [Record([at // VERSION_GROUPS] * tokens) for at in range(groups)]
    last = groups // VERSION_GROUPS
    return statistics.median(
        _timed(lambda: walk(records, last, last - last // 100)) for _ in range(rounds)
    )


def index_bytes(task: Waiting) -> dict[str, float]:
    """Return bytes a group of each key that an order adds to a task."""
    execute, groups = task.stream._task.store.client.execute, len(task.stream)
    sizes = {
        name: execute("MEMORY", "USAGE", f"{task.key}{name}", "SAMPLES", 10_000) or 0
        for name in ("facts", "ready:default", "versions:default", "newest:default")
    }
    return {name: size / groups for name, size in sizes.items() if size}


def memory_ratio(server: str | None, groups: int) -> float:
    """Return the growth of a server's memory over the bytes of the groups put."""
    with private_server(server) as (url, _), redrb.connect(url) as client:
        empty = _used_memory(client)
        for workload in LARGE_GROUPS:
            with closing(Waiting(client, "memory", workload)) as task:
                task.fill(groups // len(LARGE_GROUPS))
                stats = task.stream.stats()
        grown = _used_memory(client) - empty
    print(
        f"memory: {stats.stored} groups of {stats.bytes_put / stats.stored:.0f} bytes take "
        f"{grown / stats.stored:.0f} bytes each"
    )
    return grown / stats.bytes_put


def _used_memory(client: redrb.Client) -> int:
    info = client.execute("INFO", "memory")
    return int(info.partition(b"used_memory:")[2].split()[0])


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _waiting_costs(options: argparse.Namespace) -> dict[str, object]:
    """Time the calls whose cost may depend on the number of waiting groups."""
    with (
        private_server(options.server) as (url, _),
        redrb.connect(url) as client,
        closing(Waiting(client, "small")) as small,
        closing(Waiting(client, "large")) as large,
    ):
        small.fill(options.small)
        empty = _used_memory(client)
        seconds = _timed(lambda: large.fill(options.groups))
        waiting, stats = len(large.stream), large.stream.stats()
        grown = (_used_memory(client) - empty) / waiting
        print(
            f"{waiting} groups of {stats.bytes_put / waiting:.0f} bytes put in {seconds:.0f} s; "
            f"they take {grown:.0f} bytes each, of which "
            + ", ".join(f"{name} {size:.0f}" for name, size in index_bytes(large).items())
        )
        costs = call_costs((small, large), options.repeats)
        for call, (one, other) in costs.items():
            print(f"{call}: {one * 1e6:.0f} us at {len(small.stream)}, {other * 1e6:.0f} us")
        groups, expiry, scan, facts = expire_costs(large, options.rounds)
    walked = walk_cost(waiting, options.rounds)
    print(
        f"expire of {groups} of {waiting}: {expiry * 1e3:.1f} ms; a scan of all groups with "
        f"redis-py {scan * 1e3:.0f} ms, of all facts {facts * 1e3:.0f} ms; a walk of "
        f"objects with {SMALL_GROUPS.actions} versions of tokens each, in the memory of one "
        f"process, {walked * 1e3:.0f} ms"
    )
    return {
        "cost_1m_over_1k": {call: round(two / one, 3) for call, (one, two) in costs.items()},
        "expire_speedup": round(scan / expiry, 1),
        "expire_speedup_facts": round(facts / expiry, 1),
        "expire_speedup_in_memory": round(walked / expiry, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each throughput and scan")
    parser.add_argument("--samples", type=int, default=32_768, help="samples a round")
    parser.add_argument("--groups", type=int, default=1_000_000, help="waiting in the large task")
    parser.add_argument("--small", type=int, default=1_000, help="waiting in the small task")
    parser.add_argument("--repeats", type=int, default=1_000, help="timings of each call")
    parser.add_argument("--large-groups", type=int, default=20_000, help="groups of 15 KB")
    parser.add_argument("--server", help="path of a redis-server; default: the one on PATH")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rates = order_rates(options.server, options.rounds, options.samples)
    ratio = rates["stalest"] / rates["fifo"]
    print(f"stalest {rates['stalest']:.0f} samples/s: {ratio:.3f} of fifo ({rates['fifo']:.0f})")
    result = {
        "stalest_over_fifo": round(ratio, 3),
        **_waiting_costs(options),
        "memory_ratio": round(memory_ratio(options.server, options.large_groups), 3),
    }
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
