"""Tables on a cluster: rows on all nodes, puts appear whole, and a failover loses nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

import redrb
from redrb.errors import (
    BatchTimeout,
    LeaseLost,
    MissingRows,
    RedrbError,
    StoreFull,
    StoreUnavailable,
)
from redrb.keys import BUCKETS
from tests.clusters import RedisCluster
from tests.conftest import REAL
from tests.contract.test_table import names, ones
from tests.table_audit import audit_table, values_of


@pytest.fixture
def client(cluster: RedisCluster) -> Iterator[redrb.Client]:
    with redrb.connect(cluster.url, retry_s=20) as client:
        yield client


def test_rows_lie_on_all_nodes(open_table, client, namespace):
    table = open_table(retain="checkpoint", limit=600)
    rows = torch.arange(1200).reshape(600, 2)
    table.put(names(600), {"x": rows, "y": ["text"] * 600}, [{"s": 1}] * 600)
    on_nodes = [
        len(node.execute("KEYS", f"redrb:{{{namespace}:table:train:*"))
        for node in client.primaries()
    ]
    assert sum(on_nodes) == 600
    assert min(on_nodes) > 100
    assert torch.equal(table.batch(names(600), ["x"])["x"], rows)
    table.register("actor", ["x"])
    with table.claim("actor", count=600, timeout=0) as claim:
        assert torch.equal(claim.batch(["x"])["x"], rows)
    with pytest.raises(StoreFull):
        table.put(["more"], ones(1), timeout=0)
    table.mark("m")
    table.put(names(300), {"y": ["other"] * 300})
    assert table.clear(names(400)) == 400
    assert table.restore("m").back == 400
    audit_table(client, table)
    assert table.delete() == 600
    assert values_of(client, table)[0] == set()


def test_a_slot_of_values_moves(open_table, client, cluster):
    table, ended = open_table(), threading.Event()
    keys = [f"row{number}" for number in range(4 * BUCKETS)]
    seen: list[int] = []

    def work() -> None:
        value = 0
        while not ended.is_set() or value < 3:
            table.put(keys, {"x": [value] * len(keys)})
            assert table.get(keys)["x"] == [value] * len(keys)
            seen.append(value)
            value += 1

    working = threading.Thread(target=work)
    working.start()
    try:
        for key in (sorted(values_of(client, table)[0]) or [b"none"])[:1]:
            name = key.decode()
            to = next(each for each in cluster.primaries if each is not cluster.serving(name))
            with cluster.moving(name, to):
                pass
        index = table._index.keys.task
        to = next(each for each in cluster.primaries if each is not cluster.serving(index))
        with cluster.moving(index, to):
            pass
    finally:
        ended.set()
        working.join(60)
    assert len(seen) >= 3


@pytest.mark.long
@pytest.mark.parametrize("program", list(REAL))
@pytest.mark.parametrize("killed", ["index", pytest.param("values", marks=pytest.mark.slow)])
def test_what_was_put_is_there_after_a_failover(program, killed, namespace):
    cluster = RedisCluster(REAL[program])
    try:
        cluster.add_replicas()
        with redrb.connect(cluster.url, retry_s=90, min_replicas=1) as client:
            check_failover(cluster, client, namespace, killed)
    finally:
        cluster.close()


def check_failover(
    cluster: RedisCluster, client: redrb.Client, namespace: str, killed: str
) -> None:
    table = redrb.Table(client, "train", namespace=namespace, retain="checkpoint")
    table.register("actor", ["x", "y"])
    done: dict[str, int] = {}
    trained: set[str] = set()
    known: dict[str, Any] = {}
    ended = threading.Event()
    failures: list[BaseException] = []

    def during(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except (RedrbError, AssertionError) as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def write() -> None:
        for value in range(10_000):
            keys = [f"row{value}.{number}" for number in range(8)]
            table.put(keys, {"x": [value] * 8}, [{"v": value}] * 8)
            table.put(keys, {"y": [value] * 8})
            done.update(dict.fromkeys(keys, value))
            if ended.is_set():
                return

    def train() -> None:
        while not ended.is_set():
            try:
                with table.claim("actor", count=8, timeout=1) as claim:
                    found = claim.get()
                    assert found["x"] == found["y"]
                trained.update(claim.keys)
            except (BatchTimeout, LeaseLost, StoreUnavailable):
                continue

    def look() -> None:
        since: int | None = None
        last = False
        while not last:
            last = ended.is_set() and not threads[0].is_alive()
            changes = table.tags(since)
            if changes.whole:
                known.clear()
            known.update(changes.rows)
            since = changes.change
            with suppress(StoreUnavailable):
                table.watch(since, timeout=0.2)

    threads = [during(work) for work in (write, train, look)]
    wait_for(lambda: len(done) > 80, failures)
    index = cluster.serving(table._index.keys.task)
    victim = index if killed == "index" else next(p for p in cluster.primaries if p is not index)
    victim.kill()
    replica = cluster.replicas[cluster.primaries.index(victim)]
    wait_for(lambda: "'role': 'master'" in str(replica.run("INFO", "replication")), failures)
    victim.start()  # it becomes the replica of its replica
    before = len(done)
    wait_for(lambda: len(done) > before + 80, failures)
    ended.set()
    for thread in threads:
        thread.join(120)
    assert not failures
    found = table.get(list(done))
    assert found["x"] == found["y"] == list(done.values())
    for rows in (known, table.tags().rows):
        assert {key: row["v"] for key, row in rows.items() if key in done} == done
    stats = table.stats()
    assert stats.counts.made == stats.counts.rows + stats.counts.cleared + stats.counts.dropped
    assert stats.tasks["actor"].ledger.balanced
    assert len(trained) <= table.consumed("actor")
    with pytest.raises(MissingRows):
        table.get(["none"])


def wait_for(condition: Callable[[], bool], failures: list[BaseException]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert not failures, failures
        assert time.monotonic() < deadline
        time.sleep(0.05)
