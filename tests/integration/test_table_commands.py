"""The commands on tables of 0, 1 and 1,001 rows, on real servers."""

from __future__ import annotations

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import redrb
from redrb import Table
from redrb.cli.__main__ import main
from redrb.connection.client import scan
from redrb.keys import TableKeys
from redrb.registry import Registry
from redrb.watch.metrics.metric import METRICS
from redrb.watch.state.reader import StateReader
from tests.clusters import RedisCluster
from tests.conftest import REAL

SIZES = (0, 1, 1001)


def fill(table: Table, count: int) -> list[str]:
    """Put rows with two columns and a tag; returns their keys."""
    keys = [f"r{number}" for number in range(count)]
    if keys:
        tags = [{"status": "done", "step": number} for number in range(count)]
        columns = {"tokens": torch.arange(3 * count).reshape(count, 3), "text": ["x"] * count}
        table.put(keys, columns, tags)
    return keys


@pytest.fixture(params=SIZES)
def count(request) -> int:
    return int(request.param)


@pytest.fixture
def table(store, namespace) -> Table:
    return Table(store, "train", namespace=namespace, limit=2000, retain="checkpoint")


def test_ls_stats_and_top_show_tables_and_the_tasks_that_claim(store, namespace, table, count, run):
    keys = fill(table, count)
    table.register("actor", ["tokens"])
    table.mark("first")
    if keys:
        claim = table.claim("actor", ["tokens"], len(keys) // 2 or 1)
        claim.ack()
    eaten = len(claim) if keys else 0
    held = table.claim("actor", ["tokens"], 1) if count > 1 else None
    leased = 1 if held else 0
    waiting = count - eaten - leased
    status, out, err = run("ls", "--json")
    assert (status, err) == (0, "")
    [shown] = json.loads(out)["tables"]
    assert (shown["rows"], shown["limit"], shown["retain"]) == (count, 2000, "checkpoint")
    assert shown["marks"].keys() == {"first"}
    [actor] = shown["claims"]
    counted = {name: actor[name] for name in ("name", "waiting", "leased", "consumed")}
    assert counted == {
        "name": "train:actor",
        "waiting": waiting,
        "leased": leased,
        "consumed": eaten,
    }
    out = run("ls")[1].splitlines()
    assert [line.split()[0] for line in out] == ["TABLES", "train", "train:actor"]
    assert out[2].split() == ["train:actor", f"{waiting:,}", f"{leased}", f"{eaten:,}"]
    status, out, err = run("stats", "train")
    figures = dict(line.split(maxsplit=1) for line in out.splitlines() if line.strip())
    assert status == 0
    assert (figures["rows"], figures["balanced"]) == (f"{count:,}", "True")
    assert figures["train:actor"].startswith(f"waiting {waiting:,}, leased {leased}, ")
    first, second = map(json.loads, run("stats", "train", "--json")[1].splitlines())
    assert (first["rows"], second["name"]) == (count, "train:actor")
    assert second["groups"][0]["stats"]["ledger"]["acked"] == eaten
    for words in (("top", "--json"), ("top", "train", "--json"), ("top", "train:actor", "--json")):
        status, out, _ = run(*words)
        state = json.loads(out)["state"]
        assert (status, state["tables"][0]["claims"]) == (0, [actor])
        assert [task["name"] for task in state["tasks"]] == ["train:actor"]
        codes = {finding["code"] for finding in json.loads(out)["findings"]}
        assert not codes & {"failed-check", "starved-trainer", "unbalanced-ledger"}
    picture = run("top")[1]
    assert "  TABLES (1)" in picture
    found = StateReader(store, namespace).look()
    metrics = {one.name: list(one.read(found)) for one in METRICS if "table" in one.labels}
    at = ("train", "train:actor")
    assert metrics["redrb_table_rows"] == [(("train",), count)]
    assert metrics["redrb_table_balanced"] == [(("train",), True)]
    assert metrics["redrb_table_rows_waiting"] == [(at, waiting)]
    assert metrics["redrb_table_rows_leased"] == [(at, leased)]
    assert metrics["redrb_table_rows_consumed"] == [(at, eaten)]


def test_stats_show_no_limits_and_marks_in_their_order(store, namespace, run):
    table = Table(store, "train", namespace=namespace)
    for name in ("b", "a"):
        table.mark(name)
    lines = run("stats", "train")[1].splitlines()
    figures = {line[:18].strip(): line[18:].strip() for line in lines}
    assert (figures["limit"], figures["max_bytes"]) == ("none", "none")
    assert [name for name in figures if name.startswith("mark ")] == ["mark b", "mark a"]
    table.configure(limit=5, max_bytes=3000)
    assert "max_bytes          3.0 kB" in run("stats", "train")[1]


def test_groups_of_rows_are_counted_in_rows(table, run):
    fill(table, 8)
    table.register("critic", ["tokens"], group_size=4)
    table.claim("critic", ["tokens"], 4, group_size=4).ack()
    [shown] = json.loads(run("ls", "--json")[1])["tables"]
    assert [shown["claims"][0][name] for name in ("size", "waiting", "consumed")] == [4, 4, 4]


def test_inspect_shows_rows_with_columns_and_tags(table, count, run):
    keys = fill(table, count)
    status, out, err = run("inspect", "train", "--json")
    rows = json.loads(out)["rows"]
    assert status == 0
    assert len(rows) == min(count, 10)
    if not keys:
        assert "has no rows" in err
        return
    assert rows[0]["key"] == keys[-1]  # the newest change
    assert run("inspect", "train")[1].splitlines()[1].split()[0] == keys[-1]
    table.put(keys[:1], {"logp": np.zeros((1, 2), np.float32)})
    status, out, _ = run("inspect", "train", keys[0])
    lines = out.splitlines()
    assert (status, lines[0]) == (0, "r0: row 1")
    assert {"  tag status: 'done'", "  tag step: 0"} <= set(lines)
    for name, what in (("tokens", "int64 [3]"), ("text", "object"), ("logp", "float32 [2]")):
        assert any(line.startswith(f"  column {name}: {what}, ") for line in lines), name
    status, out, err = run("inspect", "train", keys[0], "nowhere", "--json")
    assert (status, [row["key"] for row in json.loads(out)["rows"]]) == (2, ["r0"])
    assert "nowhere" in err
    for flag in ("--follow", "--dead", "--best=3", "--where={}", "--looks=5"):
        assert run("inspect", "train", flag)[0] == 2, flag


def test_names_of_tables_and_tasks_do_not_get_in_each_others_way(store, namespace, run):
    with redrb.ExperienceStream(store, "train", namespace=namespace):
        assert run("inspect", "train")[0] == 0
        Table(store, "train", namespace=namespace).put(["a"], {"x": [1]})
        status, out, _ = run("stats", "train", "--json")
        assert (status, [json.loads(line)["name"] for line in out.splitlines()]) == (
            *(0, ["train", "train"]),
        )
        assert "no such groups" in run("inspect", "train")[2]  # the task comes first
    assert run("stats", "trian")[0] == 2
    assert run("inspect", "train:actor")[0] == 2


def of_namespace(client, namespace: str) -> list[bytes]:
    """Return the keys of a namespace on all nodes, but for those that go by themselves."""
    found = [key for one in client.primaries() for key in scan(one, f"redrb:{{{namespace}:*")]
    return [key for key in found if not key.endswith((b":registry", b":removed"))]


def test_rm_deletes_a_table_with_its_values_and_tasks(store, namespace, table, count, run):
    keys = fill(table, count)
    table.register("actor", ["tokens"])
    table.mark("m")
    table.clear(keys[:1])  # retained
    orphan = TableKeys.of(namespace, "train").value(3, "dead", 0)
    store.execute("SET", orphan, b"x")
    status, out, err = run("rm", "train", "--force")
    assert (status, "--yes" in err) == (2, True)  # no terminal
    assert f"rows               {max(count - 1, 0):,}" in out
    with redrb.ExperienceStream(store, "other", namespace=namespace):
        status, out, _ = run("rm", "train", "--yes", "--force", "--json")
        assert (status, json.loads(out)["deleted"]) == (0, max(count - 1, 0))
        assert not [key for key in of_namespace(store, namespace) if b":table:" in key]
    registry = Registry(store, namespace)
    assert (list(registry.names("task")), list(registry.names("table"))) == (["other"], [])
    assert run("rm", "train", "--yes")[0] == 2


def test_rm_unregisters_a_task_that_claims_rows(store, namespace, table, count, run):
    fill(table, count)
    for task in ("actor", "critic"):
        Table(store, "train", namespace=namespace, create=False).register(task, ["tokens"])
    assert run("rm", "train:nobody", "--yes")[0] == 2
    assert run("rm", "nothing:actor", "--yes")[0] == 2
    status, out, err = run("rm", "train:actor", "--yes", "--force")
    assert (status, err) == (0, "")
    assert f"consumer group default: {count:,} waiting, 0 leased" in out
    assert "deleted train:actor" in out
    assert (list(table.stats().tasks), table.stats().counts.rows) == (["critic"], count)
    assert list(Registry(store, namespace).names("task")) == ["train:critic"]
    assert not [key for key in of_namespace(store, namespace) if b"actor" in key]


def test_rm_names_those_who_use_a_table(store, namespace, run):
    table = Table(store, "train", namespace=namespace, limit=1)
    table.put(["a"], {"x": [1]})
    with ThreadPoolExecutor(2) as threads:
        putting = threads.submit(table.put, ["b"], {"x": [1]}, timeout=60)
        claim = table.claim("actor", ["x"], 1)
        watching = threads.submit(table.watch, table.tags().change, 60)
        prefix = TableKeys.of(namespace, "train").prefix
        for queue in ("#room", "#watch"):
            while not store.execute("EXISTS", f"{prefix}queue:{queue}"):
                pass
        status, out, err = run("rm", "train", "--yes")
        assert status == 1
        for who in ("puts that wait for room (1)", "processes that watch it (1)"):
            assert f"alive: {who}" in out
            assert who in err
        assert f"(process {os.getpid()} on {socket.gethostname()}) of task train:actor" in err
        claim.ack()
        table.clear(["a"])
        putting.result()
        assert watching.result()


@pytest.mark.long
def test_rm_deletes_values_on_all_nodes_of_a_cluster(namespace, monkeypatch):
    cluster = RedisCluster(next(iter(REAL.values())))
    try:
        with redrb.connect(cluster.url) as client:
            monkeypatch.setenv("REDRB_URL", cluster.url)
            table = Table(client, "train", namespace=namespace)
            fill(table, 1001)
            nodes = [one for one in client.primaries() if list(scan(one, f"redrb:{{{namespace}:*"))]
            assert len(nodes) > 1
            assert main(["rm", "train", "--yes", "--namespace", namespace]) == 0
            assert not of_namespace(client, namespace)
    finally:
        cluster.close()
