"""Rows of a table beside TransferQueue: `python -m benchmarks.tables`.

TransferQueue stores in SimpleStorage, in actors of Ray. A row is a trajectory of 256 to 1,800
tokens in twelve columns, with seven tags. The two systems alternate, and each figure is a ratio of
medians: how many times as fast redrb is.

`put`: 8 trajectories a call. `get 8` and `get 64`: all columns of so many rows as a TensorDict;
`get one of 8` and `get one of 64`: one column of them. `later`: a column of float32 a token for
10,000 rows, 1,000 a call. `look`: what a sampler asks for in each of its rounds: which of 100,000
rows have changed, where 100 have.

`bytes`: memory of a row in Redis, over the bytes of its columns. `million`: the time of a call on a
table of 1,000,000 rows of one small column, over that on one of 1,000, for put, get, claim and
clear of 100 rows. Without the packages of the extra `bench`, the ratios to TransferQueue are left
out, and the output says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Protocol

import torch

import redrb
from benchmarks.machine import machine
from benchmarks.server import private_server
from redrb.table import Table

TOKENS = ("input_ids", "position_ids", "attention_mask")
FLOATS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages", "returns")
SMALL = ("reward", "score", "uid_hash", "turns")
PUT_ROWS, GET_ROWS, LATER_ROWS, LATER_CALL = 8, (8, 64), 10_000, 1_000
LOOKED_AT, CHANGED = 100_000, 100

Columns = dict[str, Any]


class System(Protocol):
    """A store of rows."""

    def put(self, keys: list[str], columns: Columns | None, tags: list[dict[str, Any]]) -> None:
        """Store rows."""

    def get(self, keys: list[str], columns: list[str] | None) -> Any:
        """Return rows as a TensorDict."""

    def look(self) -> int:
        """Learn what has changed; returns the number of rows that it was told of."""


class Redrb:
    """A table of redrb."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.seen: int | None = None

    def put(self, keys: list[str], columns: Columns | None, tags: list[dict[str, Any]]) -> None:
        """Store rows."""
        self.table.put(keys, columns, tags or None)

    def get(self, keys: list[str], columns: list[str] | None) -> Any:
        """Return rows as a TensorDict."""
        from tensordict import TensorDict

        rows = self.table.get(keys, columns)
        return TensorDict({name: rows.stacked(name) for name in rows}, batch_size=[len(keys)])

    def look(self) -> int:
        """Learn what has changed."""
        found = self.table.tags(self.seen)
        self.seen = found.change
        return len(found.rows)


class TransferQueue:
    """The key-value functions of TransferQueue."""

    def __init__(self) -> None:
        import transfer_queue

        self.queue = transfer_queue

    def put(self, keys: list[str], columns: Columns | None, tags: list[dict[str, Any]]) -> None:
        """Store rows."""
        from tensordict import TensorDict

        fields = None
        if columns is not None:
            nested = {
                name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
                if isinstance(values, list)
                else values
                for name, values in columns.items()
            }
            fields = TensorDict(nested, batch_size=[len(keys)])
        self.queue.kv_batch_put(keys, "train", fields, tags or None)

    def get(self, keys: list[str], columns: list[str] | None) -> Any:
        """Return rows as a TensorDict."""
        return self.queue.kv_batch_get(keys, "train", columns)

    def look(self) -> int:
        """Learn what has changed: it lists all rows."""
        return len(self.queue.kv_list("train").get("train", {}))


def lengths(count: int) -> list[int]:
    """Return lengths of trajectories, the same in each run."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(256, 1_801, (count,), generator=generator).tolist()


def columns_of(sizes: list[int]) -> Columns:
    """Return the twelve columns of rows."""
    found: Columns = {
        name: [torch.randint(0, 32_000, (size,)) for size in sizes] for name in TOKENS
    }
    found |= {name: [torch.rand(size) for size in sizes] for name in FLOATS}
    return found | {name: torch.rand(len(sizes), 1) for name in SMALL}


def tags_of(sizes: list[int]) -> list[dict[str, Any]]:
    """Return the tags of rows."""
    steps = {"global_steps": 3, "min_global_steps": 2, "max_global_steps": 3}
    return [
        {"status": "finished", "prompt_len": 100, "response_len": size, "seq_len": size + 100}
        | steps
        for size in sizes
    ]


def packed_bytes(columns: Columns) -> int:
    """Return the bytes of columns."""
    return sum(value.nbytes for values in columns.values() for value in values)


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def race(systems: dict[str, System], rounds: int) -> dict[str, dict[str, float]]:
    """Return the medians of each system's seconds."""
    numbers = itertools.count()
    found: dict[str, dict[str, list[float]]] = {name: {} for name in systems}
    sizes = lengths(PUT_ROWS)
    columns, tags = columns_of(sizes), tags_of(sizes)
    names = [[f"u{next(numbers)}_0_0" for _ in sizes] for _ in range(max(rounds, 8))]

    def note(name: str, what: str, took: float) -> None:
        found[name].setdefault(what, []).append(took)

    for keys in names:
        for name, system in systems.items():
            note(name, "put", seconds(lambda: system.put(keys, columns, tags)))  # noqa: B023
    stored = [key for keys in names for key in keys]
    one = ["rollout_log_probs"]
    for _, count in itertools.product(range(rounds), GET_ROWS):
        keys = stored[:count]
        for name, system in systems.items():
            note(name, f"get {count}", seconds(lambda: system.get(keys, None)))  # noqa: B023
            note(name, f"get one of {count}", seconds(lambda: system.get(keys, one)))  # noqa: B023
    many = [f"later{number}" for number in range(LATER_ROWS)]
    ragged = lengths(LATER_CALL)
    for first in range(0, LATER_ROWS, LATER_CALL):
        page = many[first : first + LATER_CALL]
        small = {"turns": torch.rand(LATER_CALL, 1)}
        log_probs = {"old_log_probs": [torch.rand(size) for size in ragged]}
        for name, system in systems.items():
            system.put(page, small, tags_of(ragged))
            note(name, "later", seconds(lambda: system.put(page, log_probs, [])))  # noqa: B023
    return {
        name: {what: statistics.median(took) for what, took in times.items()}
        for name, times in found.items()
    }


def look(systems: dict[str, System], rounds: int) -> dict[str, float]:
    """Return the median seconds of a look at 100,000 rows of which 100 have changed."""
    keys = [f"look{number}" for number in range(LOOKED_AT)]
    for name, system in systems.items():
        for first in range(0, LOOKED_AT, 2_000):
            page = keys[first : first + 2_000]
            system.put(page, {"turns": torch.rand(len(page), 1)}, tags_of([900] * len(page)))
        print(f"  {name}: {LOOKED_AT} rows stored", flush=True)
        system.look()
    took: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, system in systems.items():
            system.put(keys[:CHANGED], None, tags_of([901] * CHANGED))
            took[name].append(seconds(system.look))
    return {name: statistics.median(each) for name, each in took.items()}


def million(client: redrb.Client, rounds: int, rows: int) -> dict[str, float]:
    """Return how many times as long calls on a large table take as on one of 1,000 rows."""
    tables = {1_000: Table(client, "small"), rows: Table(client, "large")}
    for size, table in tables.items():
        table.register("train", ["x"])
        for first in range(0, size, 2_000):
            count = min(2_000, size - first)
            table.put(
                [f"r{first + number}" for number in range(count)], {"x": torch.rand(count, 8)}
            )
    took: dict[str, dict[int, list[float]]] = {}

    def note(what: str, size: int, call: Callable[[], object]) -> None:
        took.setdefault(what, {}).setdefault(size, []).append(seconds(call))

    for number in range(rounds):
        keys = [f"new{number}_{place}" for place in range(100)]
        values = {"x": torch.rand(100, 8)}
        for size, table in tables.items():
            note("put", size, lambda: table.put(keys, values))  # noqa: B023
            note("get", size, lambda: table.get(keys)["x"])  # noqa: B023
            began = time.perf_counter()
            claim = table.claim("train", count=100, timeout=5)
            claim.ack()
            took.setdefault("claim", {}).setdefault(size, []).append(time.perf_counter() - began)
            note("clear", size, lambda: table.clear(claim.keys))  # noqa: B023
    return {
        what: statistics.median(times[rows]) / statistics.median(times[1_000])
        for what, times in took.items()
    }


@contextmanager
def transfer_queue() -> Iterator[TransferQueue | None]:
    """Start TransferQueue in Ray's actors; None without the packages."""
    if find_spec("transfer_queue") is None or find_spec("ray") is None:
        print("TransferQueue is not installed: pip install '.[bench]' for the ratios to it")
        yield None
        return
    import ray

    ray.init(num_cpus=8, log_to_driver=False, include_dashboard=False)
    queue = TransferQueue()
    queue.queue.init()
    try:
        yield queue
    finally:
        queue.queue.close()
        ray.shutdown()


def main() -> None:
    """Measure, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the large table")
    options = parser.parse_args()
    torch.manual_seed(0)
    result: dict[str, Any] = {"machine": machine()}
    with private_server() as server, redrb.connect(server.unix_url) as client:
        sizes = lengths(GET_ROWS[-1])
        columns = columns_of(sizes)
        table = Table(client, "bytes")
        before = server.info()["memory_bytes"]
        table.put([f"b{number}" for number in range(len(sizes))], columns, tags_of(sizes))
        grown = server.info()["memory_bytes"] - before
        result["bytes"] = round(grown / packed_bytes(columns), 3)
        with transfer_queue() as queue:
            systems: dict[str, System] = {"redrb": Redrb(Table(client, "race"))}
            if queue is not None:
                systems["TransferQueue"] = queue
            medians = race(systems, options.rounds)
            looks = look(
                {name: Redrb(Table(client, "look")) if name == "redrb" else system
                 for name, system in systems.items()},
                options.rounds,
            )  # fmt: skip
        for name, took in looks.items():
            medians[name]["look"] = took
        result["milliseconds"] = {
            name: {what: round(1e3 * took, 3) for what, took in times.items()}
            for name, times in medians.items()
        }
        if queue is not None:
            result["times_as_fast"] = {
                what: round(medians["TransferQueue"][what] / took, 2)
                for what, took in medians["redrb"].items()
            }
        server.clear()
        ratios = million(client, options.rounds, options.rows)
        result["million"] = {what: round(ratio, 3) for what, ratio in ratios.items()}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
