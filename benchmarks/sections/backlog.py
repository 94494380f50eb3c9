"""Calls while few and while many groups wait: their cost must not grow with the backlog.

Tasks of order stalest with `max_staleness` on one server, each with its backlog. A step is a weight
version: 125 groups arrive in puts of 32, the 32 stalest are taken and acknowledged, the other 93 of
the oldest version expire, so that as many wait as before. Every call is timed on all tasks in turn,
its round trip included.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import torch

import redrb
from benchmarks.options import Options
from benchmarks.server import private_server
from benchmarks.shapes import rollout
from redrb.experience import Experience

BACKLOGS = (1_000, 10_000, 100_000, 1_000_000)
CALLS = ("put", "take", "ack", "count", "expire")
BATCH = 32
VERSION_GROUPS = 125
MAX_STALENESS = 1_000_000
STEPS = 400


class Backlog:
    """A task in which groups of one small sample wait, oldest version first."""

    def __init__(self, client: redrb.Client, groups: int) -> None:
        self.stream = redrb.ExperienceStream(
            client, f"backlog-{groups}", order="stalest", max_staleness=MAX_STALENESS
        )
        self.stream.join_group()
        self._parts = [
            _batch(min(BATCH, VERSION_GROUPS - start)) for start in range(0, VERSION_GROUPS, BATCH)
        ]
        self._next, self._oldest = 0, 0
        version = _batch(VERSION_GROUPS)
        with self.stream.writer() as writer:
            for _ in range(0, groups, VERSION_GROUPS):
                writer.put(version, policy_version=self._next)
                self._next += 1

    def step(self) -> dict[str, float]:
        """Put, take, acknowledge and expire a version; returns the seconds of each call."""
        *full, rest = self._parts
        put = median(
            _timed(partial(self.stream.put, part, policy_version=self._next)) for part in full
        )
        self.stream.put(rest, policy_version=self._next)
        self.stream.advance(self._next)
        self._next += 1
        began = time.perf_counter()
        lease = self.stream.take(BATCH, timeout=0)
        taken = time.perf_counter() - began
        seconds = {"put": put, "take": taken, "ack": _timed(lease.ack)}
        seconds["count"] = _timed(self.stream.count)
        self._oldest += 1
        return {**seconds, "expire": _timed(self._expire)}

    def _expire(self) -> None:
        expired = self.stream.expire(self._oldest + MAX_STALENESS)
        if expired != VERSION_GROUPS - BATCH:
            raise SystemExit(f"{expired} groups expired, not {VERSION_GROUPS - BATCH}")


def run(options: Options) -> dict[str, Any]:
    """Return the median microseconds of each call by backlog, and their ratio to the smallest."""
    torch.set_num_threads(1)
    steps = max(20, round(STEPS * options.size))
    with ExitStack() as scope:
        server = scope.enter_context(private_server(options.server))
        client = scope.enter_context(redrb.connect(server.url))
        tasks = {}
        for groups in BACKLOGS[: 2 if options.quick else 4]:
            began = time.perf_counter()
            tasks[groups] = Backlog(client, groups)
            scope.callback(tasks[groups].stream.close)
            print(f"{groups:,} groups wait after {time.perf_counter() - began:.0f} s", flush=True)
        spent: dict[int, list[dict[str, float]]] = {groups: [] for groups in tasks}
        for number in range(-steps // 10, steps):  # the first tenth warms up
            for groups, task in tasks.items() if number % 2 else reversed(tasks.items()):
                seconds = task.step()
                if number >= 0:
                    spent[groups].append(seconds)
    costs = {
        groups: {call: median(each[call] for each in steps) * 1e6 for call in CALLS}
        for groups, steps in spent.items()
    }
    smallest = costs[BACKLOGS[0]]
    print(f"{max(costs):,} groups against {BACKLOGS[0]:,}: ", end="")
    print(", ".join(f"{call} {costs[max(costs)][call] / smallest[call]:.2f}x" for call in CALLS))
    return {
        "server": server.name,
        "microseconds": {
            str(groups): {call: round(us, 1) for call, us in each.items()}
            for groups, each in costs.items()
        },
        "over_smallest": {
            call: round(costs[max(costs)][call] / smallest[call], 3) for call in CALLS
        },
    }


def _batch(groups: int) -> Experience:
    """Return groups of one sample of 32 tokens."""
    generator = torch.Generator().manual_seed(0)
    batch = redrb.make_experience_batch([rollout(generator, 32, 16) for _ in range(groups)])
    batch.policy_version = None
    return batch


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
