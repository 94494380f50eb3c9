"""Values that are larger than the server takes are refused with its limit, before any is sent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import redrb
from redrb import BufferItem, ExperienceStream, Table, WeightPublisher
from redrb.connection import Client
from redrb.errors import EncodeError, StoreDenied
from redrb.stream.saving import file
from redrb.table import upload
from redrb.table.saving import resume_table, save_table
from tests.table_audit import audit_table, keys_of, values_of

MOST = 2 << 20


@pytest.fixture
def client(own_server):
    server = own_server("--proto-max-bulk-len", f"{MOST}")
    with redrb.connect(server.url, retry_s=30) as client:
        yield client


def item(nbytes: int) -> BufferItem:
    return BufferItem(torch.tensor([1, 2]), torch.ones(1), extras={"bytes": bytes(nbytes)})


def resumed(client: Client, name: str, path: Path) -> Table:
    """Save a table and resume it under another name."""
    save_table(client, name, path, namespace="default")
    resume_table(client, f"{name}2", path, namespace="default")
    return Table(client, f"{name}2")


LIMIT = r"bytes, and Redis at \S+ takes 2,097,152 at most \(proto-max-bulk-len\)"


@pytest.mark.long
def test_streams_tables_and_weights_refuse_what_the_server_does_not_take(client):
    with ExperienceStream(client, "math") as stream:
        stream.put(item(MOST // 2))
        with pytest.raises(EncodeError, match=f"group 0 of this put has 2,[0-9,]+ {LIMIT}: put"):
            stream.put(item(MOST))
        with pytest.raises(EncodeError, match=f"group 1 of this put has .* {LIMIT}") as caught:
            stream.put_many([[item(8)], [item(MOST)], [item(16)]])
        assert caught.value.bad_groups == (1,)
        with pytest.raises(EncodeError, match=LIMIT):
            stream.put_part("p", item(MOST), index=0, of=2)
        with stream.writer() as writer, pytest.raises(EncodeError, match=LIMIT):
            writer.put(item(MOST))
        waiting = len(stream)

    table = Table(client, "train")
    table.put(["a"], {"x": torch.zeros(1, MOST - 64, dtype=torch.uint8)})
    with pytest.raises(
        EncodeError, match=f"row 'c', with all columns .* has 2,097,1.. {LIMIT}: put"
    ):
        table.put(["b", "c"], {"x": [0, torch.zeros(MOST, dtype=torch.uint8)]}, [{"s": 1}] * 2)
    with pytest.raises(EncodeError, match=f"row 'd', its tags alone, has 2,.* {LIMIT}: store"):
        table.put(["d"], tags=[{"s": "x" * (MOST + 1)}])
    assert set(table.tags().rows) == {"a"}
    audit_table(client, table)

    publisher = WeightPublisher(client, "actor")
    chunk = rf"a chunk of weights, \S+, has [0-9,]+ {LIMIT}: raise this setting of the server to"
    with pytest.raises(EncodeError, match=chunk):
        publisher.publish({"w": torch.zeros(MOST)})
    assert publisher.publish({"w": torch.zeros(100)}).version == 1

    client.execute("CONFIG", "SET", "proto-max-bulk-len", 16 * MOST)  # no limit is remembered
    with ExperienceStream(client, "math") as stream:
        stream.put(item(MOST))
        assert len(stream) == waiting + 1
    table.put(["c"], {"x": [torch.zeros(MOST, dtype=torch.uint8)]})
    assert publisher.publish({"w": torch.zeros(MOST)}).version == 2
    stored, named = values_of(client, table)
    assert stored == named


@pytest.mark.parametrize(
    ("limit", "part", "match"),
    [
        (MOST, 900 << 10, f"row '[ab]', with the tags that it has already, has 2,7.* {LIMIT}"),
        (16 << 20, 1500 << 10, "row '[ab]', with the tags .* would have 4,60.* and 4,194,304 are"),
    ],
    ids=["of the server", "of a saved file"],
)
def test_tags_that_grow_by_merging_stay_as_large_as_a_value_may_be(
    client, tmp_path, monkeypatch, limit, part, match
):
    client.execute("CONFIG", "SET", "proto-max-bulk-len", limit)
    monkeypatch.setattr(upload, "MOST_TAGS", 4 << 20)
    monkeypatch.setattr(file, "MAX_HEAD_BYTES", 5 << 20)
    table = Table(client, "train")
    table.put(["a"], {"x": [0]}, [{"one": "x" * part}])
    table.put(["b", "a"], tags=[{"one": "y" * part}, {"two": b"x" * part}])
    table.put(["b"], tags=[{"two": "y" * part}])
    before, keys, look = table.tags(), keys_of(client, table), table.get(["a"], ["x"])["x"]
    for rows in (["a"], ["new", "a"], ["b", "a", "new"]):
        with pytest.raises(EncodeError, match=match):
            table.put(rows, {"x": [7] * len(rows)}, [{"three": "z" * part}] * len(rows))
    assert table.tags() == before
    assert (keys_of(client, table), table.get(["a"], ["x"])["x"]) == (keys, look)
    audit_table(client, table)
    table.put(["a"], tags=[{"one": 1, "three": "z" * part}])  # one becomes smaller
    assert resumed(client, "train", tmp_path / "saved").tags().rows == table.tags().rows


def test_a_row_whose_values_are_more_than_a_group_may_be_is_resumed(client, tmp_path, monkeypatch):
    monkeypatch.setattr(file, "MAX_BLOB_BYTES", MOST)
    table = Table(client, "train")
    for name in "abc":
        table.put(["r"], {name: torch.full((1, MOST // 2), ord(name), dtype=torch.uint8)})
    rows = resumed(client, "train", tmp_path / "saved").get(["r"], ["a", "b", "c"])
    assert [rows[name][0].unique().tolist() for name in "abc"] == [[97], [98], [99]]


def test_a_user_who_may_not_see_the_limit_has_the_usual_one(monkeypatch):
    with redrb.connect("fake://sizes") as client:
        client.check_size(512 << 20)

        def refuse(*_: object, **__: object) -> None:
            raise StoreDenied("no CONFIG for this user")

        monkeypatch.setattr(client, "execute", refuse)
        with pytest.raises(
            EncodeError, match=r"row 'a' has 536,870,913 bytes.* 536,870,912 at most"
        ):
            client.check_size((512 << 20) + 1, "row 'a'")


def test_the_limit_is_read_once_and_only_for_large_values(monkeypatch):
    with redrb.connect("fake://sizes") as client:
        asked: list[object] = []
        execute = Client.execute
        monkeypatch.setattr(
            Client,
            "execute",
            lambda self, *words: (asked.append(words[0]), execute(self, *words))[1],
        )
        table = Table(client, "train")
        for _ in range(3):
            table.put(["a"], {"x": torch.zeros(1, 1 << 16, dtype=torch.uint8)})
        assert "CONFIG" not in asked
        for _ in range(3):
            table.put(["a"], {"x": torch.zeros(1, 1 << 22, dtype=torch.uint8)})
        assert asked.count("CONFIG") == 1
