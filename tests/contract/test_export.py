"""Export: the form that other tools read, and that every value is in it."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from redrb import BufferItem, ConfigError, ExperienceStream, Status
from redrb.experience.records import named_tensors
from redrb.stream.export import export_task, to_json
from tests.audit import audit
from tests.samples import numbered

EXTRAS: dict[str, Any] = {
    "text": "naïve \ud7ff \u0000 text",
    "bytes": b"\x00\xff",
    "at": datetime(2026, 1, 2, 3, 4, 5, 600, tzinfo=UTC),
    "numbers": [0, -(2**63), 2**64 - 1, 1.5, -0.0, 1e300],
    "lost": [float("inf"), float("-inf")],
    "nothing": None,
    "yes": True,
    "own": msgpack.ExtType(5, b"\xff"),
    "deep": {"$bytes": "not bytes", "list": [{b"key": 1}, [], {}]},
}


def every_dtype() -> BufferItem:
    """Return a sample with a tensor of every dtype, empty ones and ones without a dimension."""
    dtypes = {
        str(dtype).removeprefix("torch."): torch.tensor([0, 1, 1, 0], dtype=torch.uint8).to(dtype)
        for dtype in (
            *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
            *(torch.uint16, torch.uint32, torch.uint64),
            *(torch.float16, torch.float32, torch.float64, torch.bfloat16),
            *(torch.float8_e4m3fn, torch.float8_e5m2),
        )
    }
    return numbered(
        1,
        tensors={
            **dtypes,
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(7, dtype=torch.int16),
            "a/name with: everything": torch.tensor([float("nan"), -0.0]),
        },
        attention_mask=torch.tensor([True, True, False]),
        token_versions=torch.tensor([3, -1]),
        policy_version=3,
        group_id="prompt 1",
        tags={"score": float("inf"), "name": "x", "good": True, "n": 3},
        extras=EXTRAS,
    )


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "groups.jsonl").read_text().splitlines()]


def test_every_dtype_and_value_is_exported(client, namespace, tmp_path):
    # samples with and without some fields, which an export keeps apart, fit into no batch
    stream = ExperienceStream(client, "from", namespace=namespace, checks=["values"])
    item = every_dtype()
    plain = numbered(2, group_id="prompt 1", kl=None, values=None)
    stream.put([item, plain])
    stream.put(numbered(3), policy_version=9)
    exported = export_task(client, "from", tmp_path / "out", namespace=namespace)
    assert (exported.groups, exported.shards) == (2, 1)
    assert exported.unreadable == ()
    first, second = lines_of(tmp_path / "out")
    assert (first["group_id"], first["policy_version"], second["policy_version"]) == (
        *("prompt 1", 3),
        9,
    )
    sample, other = first["samples"]
    assert (sample["tags"]["score"], sample["tags"]["good"]) == ({"$float": "inf"}, True)
    assert sample["extras"] == to_json(EXTRAS)
    assert {"kl", "values"}.isdisjoint(other["tensors"])
    stored = load_file(tmp_path / "out" / first["shard"])
    expected = named_tensors(item)
    assert sorted(sample["tensors"]) == sorted(expected)
    for name, tensor in expected.items():
        got = stored[f"{first['id']}/0/{name}"]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert bytes(got.reshape(-1).view(torch.uint8)) == bytes(
            tensor.reshape(-1).view(torch.uint8)
        )


def test_other_tools_read_an_export_without_redrb(client, namespace, tmp_path):
    stream = ExperienceStream(
        client, "from", namespace=namespace, order="priority", tags=["name", "score"]
    )
    stream.put(
        [numbered(1, group_id="p"), numbered(2, group_id="p")],
        policy_version=4,
        priority=2.5,
        tags={"name": "easy", "score": 0.5},
    )
    (second,) = stream.put(numbered(3), status=Status.ABORTED)
    stream.move([second], Status.FAILED)
    export_task(client, "from", tmp_path / "out", namespace=namespace)

    groups = lines_of(tmp_path / "out")
    tensors = load_file(tmp_path / "out" / groups[0]["shard"])
    rewards = [tensors[f"{groups[0]['id']}/{n}/reward"] for n, _ in enumerate(groups[0]["samples"])]
    assert rewards == [torch.tensor(1.0), torch.tensor(2.0)]
    samples = groups[0].pop("samples")
    assert groups[0] == {
        "id": 1,
        "status": "completed",
        "policy_version": 4,
        "priority": 2.5,
        "reads": 0,
        "group_id": "p",
        "tags": {"name": "easy", "score": 0.5},
        "shard": "tensors-00000.safetensors",
    }
    assert samples[0]["policy_version"] == 4
    assert samples[0]["tensors"] == list(named_tensors(numbered(1)))
    assert (groups[1]["status"], groups[1]["priority"], groups[1]["tags"]) == ("failed", None, {})
    about = json.loads((tmp_path / "out" / "export.json").read_text())
    assert (about["order"], about["tags"], about["groups"]) == ("priority", ["name", "score"], 2)


def test_the_reader_of_the_document_loads_each_file_once(
    client, namespace, tmp_path, monkeypatch, capsys
):
    stream = ExperienceStream(client, "from", namespace=namespace, checks=())
    tensors = named_tensors(numbered(1))
    for number in range(6):
        stream.put(numbered(number, **(dict.fromkeys(tensors) if number % 3 == 1 else {})))
    export_task(
        client,
        "from",
        tmp_path / "math-export",
        namespace=namespace,
        shard_bytes=3 * sum(tensor.nbytes for tensor in tensors.values()),
    )
    loaded: list[str] = []

    def counted(path):
        loaded.append(path)
        return load_file(path)

    monkeypatch.setattr("safetensors.torch.load_file", counted)
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "export.md").read_text()
    [reader] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(reader, {})
    assert capsys.readouterr().out.count("tensor(") == 4
    assert loaded == [f"math-export/tensors-0000{n}.safetensors" for n in (0, 1)]


def test_tensors_are_cut_into_files(client, namespace, tmp_path):
    stream = ExperienceStream(client, "from", namespace=namespace)
    for number in range(10):
        stream.put(numbered(number, tensors={"big": torch.full((1000,), float(number))}))
    exported = export_task(client, "from", tmp_path / "out", namespace=namespace, shard_bytes=9_000)
    assert exported.shards == 5
    for path in (tmp_path / "out").glob("tensors-*"):
        with safe_open(path, framework="pt") as shard:
            assert len({key.split("/", 2)[0] for key in shard.keys()}) == 2  # noqa: SIM118
    stored = [
        load_file(tmp_path / "out" / line["shard"])[f"{line['id']}/0/big"]
        for line in lines_of(tmp_path / "out")
    ]
    assert [int(tensor[999]) for tensor in stored] == list(range(10))


def test_reads_are_those_of_the_consumer_group(client, namespace, tmp_path):
    stream = ExperienceStream(client, "from", namespace=namespace, max_reads=3)
    critic = ExperienceStream(client, "from", namespace=namespace, group="critic")
    critic.join_group()
    stream.put_many([[numbered(number)] for number in range(2)])
    for _ in range(2):
        stream.take(1, timeout=0).ack()
    critic.take(1, timeout=0).ack()
    for group, reads in (("default", [2, 0]), ("critic", [1, 0]), ("nobody", [0, 0])):
        export_task(client, "from", tmp_path / group, namespace=namespace, group=group)
        assert [line["reads"] for line in lines_of(tmp_path / group)] == reads


def test_leased_groups_and_those_that_others_need_are_exported(client, namespace, tmp_path):
    stream = ExperienceStream(client, "from", namespace=namespace)
    critic = ExperienceStream(client, "from", namespace=namespace, group="critic")
    critic.join_group()
    for number in range(5):
        stream.put(numbered(number))
    stream.take(2, timeout=0).ack()
    leased = stream.take(1, timeout=0)
    exported = export_task(client, "from", tmp_path / "out", namespace=namespace)
    assert exported.groups == 5
    assert [line["id"] for line in lines_of(tmp_path / "out")] == [1, 2, 3, 4, 5]
    assert audit(stream)["default"].leased.keys() == set(leased.ids)


def test_groups_that_cannot_be_read_are_listed(client, namespace, tmp_path):
    stream = ExperienceStream(client, "from", namespace=namespace)
    stream.put(numbered(1))
    (bad,) = stream.put(numbered(2))
    keys = stream._task.store.keys
    at = f"9999999999999-{bad}"
    client.execute("XDEL", keys.stream, at)
    client.execute("XADD", keys.stream, f"9999999999999-{bad + 1}", "g", b"rubbish")
    client.execute("HSET", keys.puts, "last", bad + 1)
    client.execute("HSET", f"{keys.prefix}facts", f"{bad + 1:016d}", b"\x80")
    exported = export_task(client, "from", tmp_path / "out", namespace=namespace)
    assert (exported.groups, exported.unreadable) == (1, (bad + 1,))


def test_a_directory_that_is_in_the_way_is_refused(client, namespace, tmp_path):
    with pytest.raises(ConfigError, match="no task"):
        export_task(client, "from", tmp_path / "out", namespace=namespace)
    ExperienceStream(client, "from", namespace=namespace).put(numbered(1))
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(ConfigError, match="there already"):
            export_task(client, "from", path, namespace=namespace)
    with pytest.raises(ConfigError, match="cannot be written"):
        export_task(client, "from", tmp_path / "none" / "out", namespace=namespace)
    (tmp_path / "empty").mkdir()
    export_task(client, "from", tmp_path / "empty", namespace=namespace)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def test_values_that_json_lacks_have_a_form_of_their_own():
    form = to_json(EXTRAS)
    json.dumps(form, allow_nan=False)
    assert (form["bytes"], form["at"]) == (
        {"$bytes": "AP8="},
        {"$datetime": "2026-01-02T03:04:05.000600+00:00"},
    )
    assert form["own"] == {"$ext": [5, "/w=="]}
    assert form["lost"] == [{"$float": "inf"}, {"$float": "-inf"}]
    keyed = {"$map": [[{"$bytes": "a2V5"}, 1]]}
    assert form["deep"] == {"$map": [["$bytes", "not bytes"], ["list", [keyed, [], {}]]]}
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    assert to_json(deep) == deep
