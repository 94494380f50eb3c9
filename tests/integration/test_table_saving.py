"""`redrb save` and `redrb resume` of tables of 0, 1 and 1,001 rows, on real servers."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import redrb
from redrb import Table
from redrb.cli.__main__ import main
from redrb.errors import ConfigError, DecodeError, StoreError, StoreUnavailable
from redrb.keys import TableKeys
from redrb.table import saving
from redrb.table.removal import stored_values
from redrb.watch.doctor.tables import TableExamination, examine_table
from tests.clusters import RedisCluster
from tests.conftest import REAL
from tests.table_audit import audit_table


def fill(table: Table, count: int) -> list[str]:
    """Put rows, of which some are claimed, acknowledged, cleared and marked."""
    keys = [f"r{number}" for number in range(count)]
    if keys:
        columns = {"x": torch.arange(2 * count).reshape(count, 2), "text": ["x" * 50] * count}
        table.put(keys, columns, [{"step": number} for number in range(count)])
        table.put(keys[::2], {"logp": [float(number) for number in range(0, count, 2)]})
        table.put(keys[:1], {"text": ["new"]})
    table.register("actor", ["x", "logp"])
    table.register("pairs", ["x"], group_size=2)
    return keys


def content(table: Table) -> dict[str, object]:
    """Return all that a table shows: rows with their columns and tags, counts, numbers, marks."""
    tags = table.tags().rows
    counts = table.stats().counts
    keys = sorted(tags)
    columns = [set(each) if each else None for each in table.columns(keys)]
    return {
        "tags": tags,
        "columns": dict(zip(keys, columns, strict=True)),
        "numbers": dict(zip(keys, table.numbers(keys), strict=True)),
        "x": torch.stack(table.get(keys, ["x"])["x"]).tolist() if keys else [],
        "text": table.get(keys, ["text"])["text"] if keys else [],
        "marks": counts.marks,
        "counts": [getattr(counts, name) for name in ("rows", "retained", "bytes", "run", "limit")],
        "claims": {
            task: (one.columns, one.size, one.consumed) for task, one in counts.claims.items()
        },
    }


@pytest.fixture
def file(tmp_path):
    return tmp_path / "train.redrb"


@pytest.mark.parametrize("count", [0, 1, 1001])
def test_a_resumed_table_is_as_it_was_saved(store, namespace, count, run, file):
    table = Table(store, "train", namespace=namespace, retain="checkpoint", limit=5000)
    keys = fill(table, count)
    table.begin_run()
    table.mark("m1")
    if count > 1:
        table.claim("actor", ["x", "logp"], 100).ack()
        table.claim("pairs", ["x"], 20).ack()
        table.claim("actor", ["x", "logp"], 7)  # leased: they wait again
        table.clear(keys[:60])
        table.mark("m2")
    before = content(table)
    status, out, err = run("save", "train", file, "--json")
    saved = json.loads(out)
    retained = 60 if count > 1 else 0
    assert (status, saved["rows"], saved["retained"]) == (0, count - retained, retained), err
    assert run("resume", "train", file)[0] == 2  # it is there
    status, out, err = run("resume", "again", file, "--json")
    assert (status, json.loads(out)["rows"]) == (0, count - retained), err
    again = Table(store, "again", namespace=namespace)
    assert content(again) == before
    counts = again.stats().counts
    assert counts.made == counts.rows + counts.cleared + counts.dropped
    waiting = {task: one.ledger.waiting for task, one in again.stats().tasks.items()}
    of_actor = len(keys[60::2]) - before["claims"]["actor"][2] if count > 1 else count
    of_pairs = (count - 60) // 2 if count > 1 else 0  # the rows 60 to 1000
    assert waiting == {"actor": of_actor, "pairs": of_pairs}
    assert examine_table(store, namespace, "again") == TableExamination("again")
    assert not list(store.execute("KEYS", f"redrb:{{{namespace}:table:again}}:restoring:*"))
    if count > 1:
        assert again.restore("m1").back == 60
        again.put(["new"], {"x": torch.zeros(1, 2)})
        assert again.numbers(["new"]) == [count + 1]
        assert again.consumed("actor") == 0
        assert again.tags(since=1).whole  # what went before is not known


def test_puts_go_on_while_a_table_is_saved(store, namespace, file):
    table = Table(store, "train", namespace=namespace)
    keys = fill(table, 500)
    stop = threading.Event()

    def put() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            table.put(keys[:50], {"x": torch.full((50, 2), number)})
            table.clear([keys[100 + number % 200]])

    thread = threading.Thread(target=put)
    thread.start()
    try:
        saved = saving.save_table(store, "train", file, namespace=namespace)
    finally:
        stop.set()
        thread.join()
    assert 300 <= saved.rows <= 500
    saving.resume_table(store, "again", file, namespace=namespace)
    rows = Table(store, "again", namespace=namespace).get(keys[:50], ["x", "text"])
    assert all(len(set(row.tolist())) == 1 or row[1] == row[0] + 1 for row in rows["x"])
    assert examine_table(store, namespace, "again") == TableExamination("again")


def save_while_keys_come_again(table: Table, keys: list[str], file: Path) -> saving.SavedTable:
    """Save a table; when all of it is written, keys are cleared and put, with a new one."""
    scan, client = saving.scan_hash, table._index.client

    def pages(*arguments: Any) -> Iterator[list[tuple[bytes, bytes]]]:
        """HSCAN may return rows that are put meanwhile, and rows twice."""
        yield from scan(*arguments)
        table.clear(keys)
        table.put(["new", *keys], {"x": torch.full((1 + len(keys), 2), -1)})
        yield from scan(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "scan_hash", pages)
        return saving.save_table(client, "train", file, namespace=table._index.namespace)


@pytest.mark.parametrize("retain", [None, "checkpoint"])
def test_keys_are_cleared_and_put_again_while_a_table_is_saved(store, namespace, file, retain):
    table = Table(store, "train", namespace=namespace, retain=retain)
    keys = fill(table, 8)
    table.claim("actor", count=2, timeout=0).ack()
    table.claim("pairs", count=2, timeout=0).ack()
    table.mark("m")
    table.clear(keys[7:])
    before, retained = content(table), int(retain is not None)
    saved = save_while_keys_come_again(table, keys[:3], file)
    assert (saved.rows, saved.retained) == (7 + 1, retained)
    resumed = saving.resume_table(store, "again", file, namespace=namespace)
    assert (resumed.rows, resumed.retained) == (saved.rows, retained)
    again = Table(store, "again", namespace=namespace)
    audit_table(store, again)
    assert examine_table(store, namespace, "again") == TableExamination("again")
    assert again.get(["new"], ["x"])["x"][0].tolist() == [-1, -1]
    again.clear(["new"])
    after = content(again)
    changed = {name for name in before if after[name] != before[name]}
    assert changed <= {"counts"}  # with retain, "new" is retained
    assert after["counts"][:1] == before["counts"][:1] == [7]
    if retained:
        assert again.restore("m", later="drop").back == 1
        assert again.numbers(keys) == list(range(1, 9))


def test_a_file_that_has_a_key_twice_changes_nothing(store, namespace, file, monkeypatch):
    table = Table(store, "train", namespace=namespace)
    keys = fill(table, 8)
    monkeypatch.setattr(saving.SavedRow, "key", property(lambda row: row.number))
    assert save_while_keys_come_again(table, keys[:1], file).rows == 8 + 2
    monkeypatch.undo()
    with pytest.raises(StoreError, match="has some twice"):
        saving.resume_table(store, "again", file, namespace=namespace)
    assert not store.execute("KEYS", f"redrb:{{{namespace}:table:again*")


def test_a_damaged_file_changes_nothing(store, namespace, file, tmp_path):
    fill(Table(store, "train", namespace=namespace), 30)
    saving.save_table(store, "train", file, namespace=namespace)
    whole = file.read_bytes()
    half = len(whole) // 2
    for damaged in (
        whole[:-20],
        whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :],
    ):
        file.write_bytes(damaged)
        with pytest.raises(DecodeError, match="damaged"):
            saving.resume_table(store, "again", file, namespace=namespace)
    task = tmp_path / "math.redrb"
    with redrb.ExperienceStream(store, "math", namespace=namespace) as stream:
        stream.save(task)
        shutil.copy(task, file)
        with pytest.raises(DecodeError, match="no file of a table"):
            saving.resume_table(store, "again", file, namespace=namespace)
        file.write_bytes(whole)
        with pytest.raises(DecodeError):
            stream.resume(file)
    assert not store.execute("KEYS", f"redrb:{{{namespace}:table:again*")


@pytest.mark.parametrize("step", ["store", "end"])
def test_a_resume_that_fails_leaves_nothing(store, namespace, file, monkeypatch, step):
    fill(Table(store, "train", namespace=namespace), 1001)
    saving.save_table(store, "train", file, namespace=namespace)
    calls = []
    real = saving.store

    def fail(client, values):
        calls.append(len(values))
        real(client, values[: len(values) // 2])
        raise StoreUnavailable("away", where="there")

    if step == "store":
        monkeypatch.setattr(saving, "store", fail)
    else:
        monkeypatch.setattr(saving._Area, "end", lambda *_: "used")
    with pytest.raises((StoreUnavailable, ConfigError)):
        saving.resume_table(store, "again", file, namespace=namespace)
    assert not store.execute("KEYS", f"redrb:{{{namespace}:table:again*")
    monkeypatch.undo()
    assert saving.resume_table(store, "again", file, namespace=namespace).rows == 1001


def test_no_key_of_a_long_resume_expires_before_the_others(store, namespace, file, monkeypatch):
    table = Table(store, "train", namespace=namespace)
    keys = fill(table, 8)
    table.claim("actor", count=1, timeout=0).ack()
    monkeypatch.setattr(saving, "FRAME_BYTES", 1)
    saving.save_table(store, "train", file, namespace=namespace)
    add, frames = saving._Area.add, []

    def late(area, *arguments):
        """Most of the time is over when the next frame is added."""
        for name in area._names:
            store.execute("PEXPIRE", f"{area._prefix}{name}", saving.AREA_TTL_MS // 10)
        add(area, *arguments)
        left = [store.execute("PTTL", f"{area._prefix}{name}") for name in area._names]
        assert not [ms for ms in left if 0 <= ms <= saving.AREA_TTL_MS // 2]
        frames.append(left)

    monkeypatch.setattr(saving._Area, "add", late)
    saving.resume_table(store, "again", file, namespace=namespace)
    assert 1 < len(frames) <= len(keys)
    assert Table(store, "again", namespace=namespace).consumed("actor") == 1


@pytest.mark.long
def test_a_table_moves_from_a_cluster_to_a_server_as_an_admin(
    store, namespace, log_in, file, monkeypatch
):
    cluster = RedisCluster(next(iter(REAL.values())))
    try:
        with redrb.connect(cluster.url) as client:
            table = Table(client, "train", namespace=namespace)
            fill(table, 300)
            before = content(table)
            saving.save_table(client, "train", file, namespace=namespace)
            table.delete()
            saving.resume_table(client, "train", file, namespace=namespace)
            assert content(Table(client, "train", namespace=namespace)) == before
            pages = stored_values(client, TableKeys.of(namespace, "train"))
            assert sum(map(len, pages)) == 300 + 150 + 1
    finally:
        cluster.close()
    admin = log_in("admin", "--table", "train", tasks=())
    monkeypatch.setenv("REDRB_URL", admin.url)
    words = ["--namespace", namespace]
    assert main(["resume", "train", str(file), *words]) == 0
    assert content(Table(store, "train", namespace=namespace)) == before
    assert main(["save", "train", str(file), *words]) == 0
    assert main(["doctor", "train", "--repair", "--over=0.2", *words]) == 0
    assert main(["rm", "train", "--yes", "--force", *words]) == 0
