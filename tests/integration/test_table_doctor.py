"""`redrb doctor` on tables: values without a row, rows without values, trash, dead claims."""

from __future__ import annotations

import json

import pytest
import torch

import redrb
from redrb import Table
from redrb.keys import TableKeys
from redrb.registry import Registry
from redrb.watch.doctor import tables
from redrb.watch.doctor.tables import OLD_S, examine_table
from tests.clusters import RedisCluster
from tests.conftest import REAL
from tests.scenes import silence

CODES = {"lost-values", "orphaned-values", "undeleted-values", "different-storage"}


def fill(client, namespace: str, count: int = 3) -> Table:
    table = Table(client, "train", namespace=namespace, retain="checkpoint")
    keys = [f"r{number}" for number in range(count)]
    if keys:
        table.put(keys, {"x": torch.arange(count)}, [{"s": 1}] * count)
        table.put(keys[:2], {"y": [1] * len(keys[:2])})
    return table


def leave_value(client, namespace: str, bucket: int, idle_s: int) -> str:
    """Store a value as a put does that died; nobody has used it for a time."""
    key = TableKeys.of(namespace, "train").value(bucket, "dead1", bucket)
    node = client.at(key)
    node.execute("SET", key, b"left")
    dumped = node.execute("DUMP", key)
    node.execute("RESTORE", key, 0, dumped, "REPLACE", "IDLETIME", idle_s)
    return key


@pytest.fixture
def doctor(run):
    """Run doctor on the table; returns its findings and repairs by code."""

    def run_doctor(*words, subject="train"):
        _, out, _ = run("doctor", *([subject] if subject else []), *words, "--over=0.2", "--json")
        report = json.loads(out)
        found = {one["code"]: one["summary"] for one in report["findings"]}
        return {code: found[code] for code in found.keys() & CODES}, report

    return run_doctor


@pytest.mark.parametrize("count", [0, 1, 1001])
def test_a_whole_table_has_no_findings(store, namespace, count, doctor):
    table = fill(store, namespace, count)
    table.mark("m")
    table.clear(["r0"])
    found, report = doctor()
    assert (found, report["repairs"]) == ({}, [])
    assert "unchecked" not in {one["code"] for one in report["findings"]}
    assert doctor(subject="")[0] == {}


def test_old_values_of_no_row_are_deleted_and_new_ones_stay(store, namespace, doctor):
    table = fill(store, namespace)
    old = [leave_value(store, namespace, bucket, OLD_S + 5) for bucket in (3, 60)]
    new = leave_value(store, namespace, 7, 0)
    found, _ = doctor()
    assert found == {"orphaned-values": "2 values of no row, unused for 15 minutes."}
    found, report = doctor("--repair")
    assert found == {}
    assert [one["code"] for one in report["repairs"]] == ["orphaned-values"]
    assert store.execute("EXISTS", *old, new) == 1
    assert store.execute("EXISTS", new) == 1
    assert table.get(["r0"])["y"][0] == 1


def test_an_old_value_that_a_row_has_meanwhile_is_not_deleted(store, namespace):
    table = fill(store, namespace)
    key = table._index.find(["r0"])[0].places["x"].key
    dumped = store.execute("DUMP", key)
    store.execute("RESTORE", key, 0, dumped, "REPLACE", "IDLETIME", OLD_S + 5)
    seen = tables.TableExamination("train", orphans=(key,))
    assert tables.delete_orphans(store, namespace, seen) == ("deleted 0 values of no row", True)
    assert store.execute("EXISTS", key)


def test_rows_without_values_are_named(store, namespace, doctor, run):
    table = fill(store, namespace)
    store.execute("DEL", table._index.find(["r1"])[0].places["y"].key)
    found, _ = doctor()
    assert found == {"lost-values": "Rows that lack values: 1, such as r1."}
    assert "column y: gone" in run("inspect", "train", "r1")[1]
    table.mark("m")
    table.clear(["r1"])
    assert "lost-values" in doctor()[0]  # it is retained
    table.delete()
    fill(store, namespace)
    assert doctor()[0] == {}


def test_values_that_nobody_deletes_are_deleted(store, namespace, doctor, monkeypatch):
    table = Table(store, "train", namespace=namespace)
    table.put(["a"], {"x": [1]})
    monkeypatch.setattr(table, "_empty_trash", lambda **_: None)  # it dies before
    table.clear(["a"])
    found, _ = doctor()
    assert found == {
        "undeleted-values": "1 value of cleared or replaced rows, not deleted yet.",
    }
    found, report = doctor("--repair")
    assert (found, [one["code"] for one in report["repairs"]]) == ({}, ["undeleted-values"])


def test_an_index_that_contradicts_itself_is_found(store, namespace, doctor):
    fill(store, namespace)
    prefix = TableKeys.of(namespace, "train").prefix
    store.execute("HDEL", f"{prefix}tags", "2")
    assert "tags of 2" in doctor()[0]["different-storage"]
    store.execute("HINCRBY", f"{prefix}task", "made", 5)
    _, report = doctor()
    assert "unbalanced-ledger" in {one["code"] for one in report["findings"]}


def test_a_search_that_takes_too_long_says_so(store, namespace, doctor, monkeypatch):
    fill(store, namespace)
    monkeypatch.setattr(tables, "LEFT_S", 1000.0)
    _, report = doctor()
    unchecked = {one["code"]: one["summary"] for one in report["findings"]}["unchecked"]
    assert "values of table train (give a longer --timeout)" in unchecked


def test_claims_of_dead_processes_and_names_without_tables(store, namespace, doctor, no_heartbeats):
    table = fill(store, namespace)
    table.claim("actor", ["x"], 2)
    stream = table._claims._open["actor"].stream
    silence(stream)
    prefix = TableKeys.of(namespace, "train").prefix
    consumers = f"{prefix}claims:actor:consumers:default"
    for name in store.execute("ZRANGE", consumers, 0, -1):
        store.execute("ZADD", consumers, 1, name)
    Registry(store, namespace).add("table", "left")
    _, report = doctor(subject="")
    found = {one["code"]: one["subject"] for one in report["findings"]}
    assert found["dead-consumer"] == "task train:actor"
    assert found["name-without-task"] == "table left"
    _, report = doctor("--repair", subject="")
    assert not list(Registry(store, namespace).names("table"))[1:]


@pytest.mark.long
def test_values_on_all_nodes_of_a_cluster_are_examined(namespace):
    cluster = RedisCluster(next(iter(REAL.values())))
    try:
        with redrb.connect(cluster.url) as client:
            fill(client, namespace, 100)
            assert examine_table(client, namespace, "train") == tables.TableExamination("train")
            left = {leave_value(client, namespace, bucket, OLD_S + 5) for bucket in range(64)}
            seen = examine_table(client, namespace, "train")
            assert set(seen.orphans) == left
            tables.delete_orphans(client, namespace, seen)
            assert examine_table(client, namespace, "train") == tables.TableExamination("train")
    finally:
        cluster.close()


@pytest.mark.parametrize("count", [1, 1001])
def test_values_beside_a_table_that_was_created_over_them_are_named(
    store, namespace, count, doctor
):
    """A resume died, and another process opened the table."""
    keys = TableKeys.of(namespace, "train")
    store.execute("HSET", keys.task, "left", "dead1")
    for bucket in range(count):
        leave_value(store, namespace, bucket, 0)
    fill(store, namespace)
    _, report = doctor()
    (found,) = (one for one in report["findings"] if one["code"] == "unfinished-table")
    assert f"beside {count:,} value" in found["summary"]
    assert found["command"] == f"redrb doctor train --repair --namespace {namespace}"
    for bucket in range(count):
        leave_value(store, namespace, bucket, OLD_S + 60)
    doctor("--repair")
    _, report = doctor()
    assert "unfinished-table" not in {one["code"] for one in report["findings"]}
