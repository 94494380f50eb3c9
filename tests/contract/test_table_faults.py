"""Broken connections, full servers, forks and threads: each change of a table is made once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from redis.exceptions import ConnectionError as Broken

import redrb
from redrb.connection import Client
from redrb.connection.transport import Pipeline
from redrb.errors import BatchTimeout, ConfigError, StaleRun, StoreFull, UnknownTask
from redrb.table.calls import Sweep
from tests.contract.test_table import names, ones
from tests.contract.test_table_restore import content
from tests.proxy import Proxy
from tests.table_audit import audit_table, values_of

TableOpener = Callable[..., redrb.Table]


@pytest.fixture
def losing(client: Client, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lose the reply of the next request that runs a script; `meanwhile` is called then."""
    exchange = client.exchange

    def lose(meanwhile: Callable[[], object] = lambda: None) -> None:
        def losing_one(pipeline: Pipeline) -> Any:
            replies = exchange(pipeline)
            last = replies[-1] if isinstance(replies[-1], list) else replies
            if any(isinstance(each, Exception) for each in last):  # an unknown script
                return replies
            monkeypatch.setattr(client, "exchange", exchange)
            meanwhile()
            raise Broken("Connection closed by server.")

        monkeypatch.setattr(client, "exchange", losing_one)

    return lose


CHANGES: dict[str, Callable[[redrb.Table], object]] = {
    "put": lambda table: table.put(["c"], {"x": [3]}),
    "clear": lambda table: table.clear(["a"]),
    "clear all": lambda table: table.clear(),
    "mark": lambda table: table.mark("n"),
    "sweep": lambda table: table._index.do(Sweep),
    "register": lambda table: table.register("more", ["x"]),
    "restore": lambda table: table.restore("m", "drop"),
    "delete": lambda table: table.delete(),
}
"""Everything that changes a table, which a script may refuse."""


@pytest.mark.parametrize("change", CHANGES)
def test_no_change_of_an_earlier_run_slips_past_a_look(open_table, monkeypatch, change):
    """Its process looks, and finds its run the newest; the next one begins before it goes on."""
    table, driver = open_table(retain="checkpoint"), open_table()
    table.put(["a", "gone"], {"x": [1, 2]})
    table.mark("m")
    table.clear(["gone"])
    table.put(["b"], {"x": [2]})
    before = content(table), table.stats()
    driver.begin_run()
    monkeypatch.setattr(table._index, "refuse_stale", lambda: None)
    with pytest.raises(StaleRun):
        CHANGES[change](table)
    rows, stats = before
    counts = replace(stats.counts, run=driver.run, change=driver.stats().counts.change)
    assert (content(driver), driver.stats().counts) == (rows, counts)
    audit_table(table._client, table)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_all_was_lost_is_one_of_the_table_that_is_made_anew(
    open_table, client, namespace, change
):
    table = open_table(retain="checkpoint")
    table.put(["a", "b"], {"x": [1, 2]})
    table.mark("m")
    for key in client.execute("KEYS", f"redrb:{{{namespace}:*"):
        client.execute("UNLINK", key)
    refused = {"restore": "no mark 'm'", "delete": "no table"}.get(change)
    with pytest.raises((ConfigError, UnknownTask), match=refused) if refused else nullcontext():
        CHANGES[change](table)
    assert set(content(table)) == ({"c"} if change == "put" else set())
    table.put(["d"], {"x": [4]})
    audit_table(client, table)


@pytest.mark.parametrize("retain", [None, "checkpoint"])
@pytest.mark.parametrize(
    "meanwhile", ["nothing", "overwritten", "tagged", "cleared", "put anew", "restored", "run"]
)
def test_a_repeated_put_changes_nothing_more(open_table, losing, retain, meanwhile):
    table, other = open_table(retain=retain), open_table()
    table.put(["a", "old"], {"x": ["early"] * 2, "w": [0] * 2})
    table.mark("m")
    new = {"x": ["now"] * 2, "y": [1] * 2}

    def act() -> None:
        match meanwhile:
            case "overwritten":
                other.put(["a"], {"x": ["later"], "y": [2]})
            case "tagged":
                other.put(["a"], tags=[{"s": "later"}])
            case "cleared" | "restored":
                other.clear(["a", "b"])
            case "put anew":
                other.clear(["a"])
                other.put(["a"], {"x": ["anew"]})
            case "run":
                other.begin_run()
        if meanwhile == "restored":
            other.restore("m")

    losing(act)
    changed = table.put(["a", "b"], new, [{"s": "now"}] * 2, timeout=5)
    assert changed <= other.tags().change
    rows, tags = content(other), other.tags().rows
    row = {"x": "now", "y": 1}
    expected = {
        "nothing": {"a": row | {"w": 0}, "b": row},
        "overwritten": {"a": {"x": "later", "y": 2, "w": 0}, "b": row},
        "tagged": {"a": row | {"w": 0}, "b": row},
        "cleared": {},
        "put anew": {"a": {"x": "anew"}, "b": row},
        "restored": {"a": row | {"w": 0}, "b": row} if retain else {},
        "run": {"a": row | {"w": 0}, "b": row},
    }[meanwhile]
    assert rows == {"old": {"x": "early", "w": 0}} | expected
    assert tags.get("a", {}).get("s") == {
        "nothing": "now", "overwritten": "now", "tagged": "later", "cleared": None,
        "put anew": None, "restored": "now" if retain else None, "run": "now",
    }[meanwhile]  # fmt: skip
    if retain and meanwhile in ("cleared", "put anew"):
        other.clear()
        other.restore("m")
        assert content(other)["a"] == row | {"w": 0}


@pytest.mark.parametrize("retain", [None, "checkpoint"])
def test_a_repeated_clear_goes_on_and_removes_nothing_new(
    open_table, losing, pages, monkeypatch, retain
):
    pages(table_rows=3)
    table, other = open_table(retain=retain), open_table()
    table.put(names(8), ones(8))
    losing(lambda: other.put(["row0"], ones(1, 5)))
    assert table.clear(names(2)) == 2
    assert other.tags().rows.keys() == {"row0", *names(6, 2)}
    with ThreadPoolExecutor(1) as pool:
        until = table.watch(0)
        assert until == pool.submit(other.watch, 0).result()
    do, lost = table._index.do, iter(range(1))

    def losing_once(*arguments: Any, **asked: Any) -> Any:
        for _ in lost:
            losing()
        return do(*arguments, **asked)

    monkeypatch.setattr(table._index, "do", losing_once)
    assert table.clear() == 7
    assert other.tags().rows == {}


def test_a_repeated_mark_is_one(open_table, losing):
    table = open_table(retain="checkpoint")
    table.put(["a"])
    table.mark("m1")
    losing()
    change = table.mark("m2")
    assert table.marks() == {"m1": table.marks()["m1"], "m2": change}


@pytest.mark.every_server
def test_puts_and_clears_through_a_broken_network(real_url, namespace):
    port = int(real_url.rsplit(":", 1)[1].split("/")[0])
    with (
        Proxy("127.0.0.1", port) as proxy,
        redrb.connect(f"redis://127.0.0.1:{proxy.port}", retry_s=30) as broken,
        redrb.connect(real_url) as client,
    ):
        table = redrb.Table(broken, "train", namespace=namespace, retain="checkpoint")
        sound = redrb.Table(client, "train", namespace=namespace)
        ended = threading.Event()

        def break_it() -> None:
            for after in range(10_000):
                links = proxy.links
                proxy.cut_in_reply(links, after % 40)
                if ended.wait(0.01):
                    return

        breaker = threading.Thread(target=break_it)
        breaker.start()
        try:
            for value in range(60):
                table.put(["a", f"b{value}"], ones(2, value), [{"v": value}] * 2)
                if value % 3 == 0:
                    assert table.clear([f"b{value}"]) == 1
                if value % 20 == 0:
                    table.mark(f"m{value}")
        finally:
            ended.set()
            breaker.join()
        kept = [value for value in range(60) if value % 3]
        assert sound.tags().rows.keys() == {"a", *(f"b{value}" for value in kept)}
        found = sound.get(["a", *(f"b{value}" for value in kept)])["x"]
        assert [each[0].item() for each in found] == [59, *kept]
        assert sound.stats().counts.made == 61
        audit_table(client, sound)
        sound.delete()


@pytest.mark.long
def test_a_put_that_the_server_has_no_memory_for_leaves_nothing(own_server):
    server = own_server("--maxmemory-policy", "noeviction")
    with redrb.connect(server.url, retry_s=1) as client:
        table = redrb.Table(client, "train")
        table.put(names(8), {"x": torch.zeros(8, 1 << 17)}, [{"s": 1}] * 8)
        before = table.tags()
        for limit, rows in [("10mb", 16), ("90mb", 90)]:  # the second one is several requests
            client.execute("CONFIG", "SET", "maxmemory", limit)
            with pytest.raises(StoreFull, match="memory"):
                table.put(names(rows, 4), {"x": torch.ones(rows, 1 << 18)}, [{"s": 2}] * rows)
            assert table.tags() == before
            stored, named = values_of(client, table)
            assert stored == named
        client.execute("CONFIG", "SET", "maxmemory", "10mb")
        client.execute("CONFIG", "SET", "maxmemory", "1mb")
        with pytest.raises(StoreFull, match="memory"):  # new rows of tags alone
            table.put(["new"], tags=[{"s": 3}])
        table.put(names(1), tags=[{"s": 3}])  # what is there may be marked as done
        assert table.tags().rows == before.rows | {"row0": {"s": 3}}
        client.execute("CONFIG", "SET", "maxmemory", "10mb")
        table.clear(names(4))
        table.put(names(4), {"x": torch.ones(4, 1 << 10)})
        audit_table(client, table)


def test_forked_processes_write_under_their_own_names(real_url, namespace):
    with redrb.connect(real_url) as client:
        table = redrb.Table(client, "train", namespace=namespace)
        table.put(["a"], ones(1))
        children = []
        for number in range(3):
            child = os.fork()
            if child == 0:
                table.put([f"child{number}"], ones(1, number))
                table.put(["a"], {f"c{number}": [number]})
                os._exit(0)
            children.append(child)
        for number in range(3):
            table.put([f"parent{number}"], ones(1, number))
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
        assert len(table.tags().rows) == 7
        assert set(table.get(["a"])) == {"x", "c0", "c1", "c2"}
        audit_table(client, table)
        table.delete()


def test_threads_share_a_table(open_table):
    table = open_table(limit=40)
    table.register("actor", ["x", "y"])
    trained: list[str] = []
    writing = threading.Barrier(4)

    def write(number: int) -> None:
        writing.wait()
        for step in range(20):
            keys = names(3, 1000 * number + 3 * step)
            table.put(keys, {"x": [step] * 3}, timeout=60)
            table.put(keys, {"y": [step] * 3})

    def train() -> None:
        while len(trained) < 240:
            try:
                claim = table.claim("actor", count=5, at_least=1, timeout=0.2)
            except BatchTimeout:
                continue
            found = claim.get()
            assert found["x"] == found["y"]
            claim.ack()
            assert table.clear(claim.keys) == len(claim.keys)
            trained.extend(claim.keys)

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(train) for _ in range(2)] + [
            pool.submit(write, number) for number in range(4)
        ]:
            done.result(120)
    assert len(trained) == len(set(trained)) == 240
    assert table.stats().counts.rows == 0
