"""Values that are larger than the server takes are refused with its limit, before any is sent."""

from __future__ import annotations

import pytest
import torch

import redrb
from redrb import BufferItem, ExperienceStream, Table, WeightPublisher
from redrb.connection import Client
from redrb.errors import EncodeError, StoreDenied
from tests.table_audit import audit_table, values_of

MOST = 2 << 20


@pytest.fixture
def client(own_server):
    server = own_server("--proto-max-bulk-len", f"{MOST}")
    with redrb.connect(server.url, retry_s=30) as client:
        yield client


def item(nbytes: int) -> BufferItem:
    return BufferItem(torch.tensor([1, 2]), torch.ones(1), extras={"bytes": bytes(nbytes)})


LIMIT = r"bytes, and Redis at \S+ takes 2,097,152 at most \(proto-max-bulk-len\)"


@pytest.mark.long
def test_streams_tables_and_weights_refuse_what_the_server_does_not_take(client):
    with ExperienceStream(client, "math") as stream:
        stream.put(item(MOST // 2))
        with pytest.raises(EncodeError, match=f"group 0 of this put has 2,[0-9,]+ {LIMIT}"):
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
    with pytest.raises(EncodeError, match=f"row 'c', with all columns .* has 2,097,1.. {LIMIT}"):
        table.put(["b", "c"], {"x": [0, torch.zeros(MOST, dtype=torch.uint8)]}, [{"s": 1}] * 2)
    with pytest.raises(EncodeError, match=LIMIT):
        table.put(["d"], tags=[{"s": "x" * (MOST + 1)}])
    assert set(table.tags().rows) == {"a"}
    audit_table(client, table)

    publisher = WeightPublisher(client, "actor")
    with pytest.raises(EncodeError, match=LIMIT):
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
