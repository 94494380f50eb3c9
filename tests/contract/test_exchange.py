"""Export and import: the form that other tools read, and that all groups come back."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from redrb import BufferItem, ConfigError, ExperienceStream, Status, TaskMismatch
from redrb.connection import Client
from redrb.errors import DecodeError
from redrb.experience.records import named_tensors
from redrb.stream.exchange import export_task, import_task
from redrb.stream.exchange.json_values import from_json, to_json
from tests.audit import audit
from tests.samples import assert_same, numbered, numbers

EXTRAS: dict[str, Any] = {
    "text": "naïve \ud7ff \u0000 text",
    "bytes": b"\x00\xff",
    "at": datetime(2026, 1, 2, 3, 4, 5, 600, tzinfo=UTC),
    "numbers": [0, -(2**63), 2**64 - 1, 1.5, -0.0, 1e300],
    "lost": [float("inf"), float("-inf")],
    "nothing": None,
    "yes": True,
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


def test_all_contents_are_restored(client: Client, namespace: str, tmp_path: Path) -> None:
    # samples with and without some fields, which an export keeps apart, fit into no batch
    stream = ExperienceStream(client, "from", namespace=namespace, checks=["values"])
    item = every_dtype()
    plain = numbered(2, group_id="prompt 1", kl=None, values=None)
    stream.put([item, plain])
    stream.put(numbered(3), policy_version=9)
    exported = export_task(client, "from", tmp_path / "out", namespace=namespace)
    assert (exported.groups, exported.archived, exported.shards) == (2, 0, 1)
    assert exported.unreadable == ()
    imported = import_task(client, "to", tmp_path / "out", namespace=namespace)
    assert (imported.groups, imported.archived) == (2, 0)
    back = ExperienceStream(client, "to", namespace=namespace)
    audit(back)
    first, second = back.take(2, timeout=0).groups()
    nan = "a/name with: everything"
    assert torch.equal(first[0].tensors[nan].isnan(), torch.tensor([True, False]))
    assert torch.equal(torch.signbit(first[0].tensors.pop(nan))[1], torch.tensor(data=True))
    del item.tensors[nan]
    for got in first[0].tensors.values():
        expected = item.tensors[str(got.dtype).removeprefix("torch.")] if got.dim() == 1 else None
        if expected is not None:
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    for name in [name for name in item.tensors if "float8" in name or name[:5] == "uint1"]:
        del item.tensors[name], first[0].tensors[name]  # torch.equal does not know them
    assert_same(first[0], item)
    assert_same(first[1], plain)
    assert_same(second[0], numbered(3, policy_version=9))


def test_other_tools_read_an_export_without_redrb(
    client: Client, namespace: str, tmp_path: Path
) -> None:
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
        "archived_ms": None,
        "tags": {"name": "easy", "score": 0.5},
        "shard": "tensors-00000.safetensors",
    }
    assert samples[0]["policy_version"] == 4
    assert samples[0]["tensors"] == list(named_tensors(numbered(1)))
    assert (groups[1]["status"], groups[1]["priority"], groups[1]["tags"]) == ("failed", None, {})
    about = json.loads((tmp_path / "out" / "export.json").read_text())
    assert (about["order"], about["tags"], about["groups"]) == ("priority", ["name", "score"], 2)

    import_task(client, "to", tmp_path / "out", namespace=namespace)
    back = ExperienceStream(client, "to", namespace=namespace, order="priority")
    assert back.counts()[Status.FAILED] == 1
    assert numbers(back.take(1, timeout=0, where={"name": "easy", "score_gt": 0.4})) == [1, 2]
    audit(back)


def test_the_reader_of_the_document_loads_each_file_once(
    client: Client,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream = ExperienceStream(client, "from", namespace=namespace, checks=())
    tensors = named_tensors(numbered(1))
    for number in range(6):
        stream.put(numbered(number, **(dict.fromkeys(tensors) if number % 3 == 1 else {})))
    export_task(
        *(client, "from", tmp_path / "math-export"),
        namespace=namespace,
        shard_bytes=3 * sum(tensor.nbytes for tensor in tensors.values()),
    )
    loaded: list[str] = []

    def counted(path: str) -> dict[str, torch.Tensor]:
        loaded.append(path)
        return load_file(path)

    monkeypatch.setattr("safetensors.torch.load_file", counted)
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "saving.md").read_text()
    [reader] = re.findall(r"can be read without redrb:\n\n```python\n(.*?)```", page, re.DOTALL)
    exec(reader, {})
    assert capsys.readouterr().out.count("tensor(") == 4
    assert loaded == [f"math-export/tensors-0000{n}.safetensors" for n in (0, 1)]


def test_tensors_are_cut_into_files(client: Client, namespace: str, tmp_path: Path) -> None:
    stream = ExperienceStream(client, "from", namespace=namespace)
    for number in range(10):
        stream.put(numbered(number, tensors={"big": torch.full((1000,), float(number))}))
    exported = export_task(client, "from", tmp_path / "out", namespace=namespace, shard_bytes=9_000)
    assert exported.shards == 5
    for path in (tmp_path / "out").glob("tensors-*"):
        with safe_open(path, framework="pt") as shard:
            assert len({key.split("/", 2)[0] for key in shard.keys()}) == 2  # noqa: SIM118
    import_task(client, "to", tmp_path / "out", namespace=namespace)
    back = ExperienceStream(client, "to", namespace=namespace)
    items = list(back.take(10, timeout=0).items())
    assert numbers(items) == list(range(10))
    assert [int(item.tensors["big"][999]) for item in items] == list(range(10))


def test_history_is_exported_and_not_put_again(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    stream = ExperienceStream(client, "from", namespace=namespace, keep_groups=9)
    for number in range(5):
        stream.put(numbered(number))
    stream.take(2, timeout=0).ack()
    leased = stream.take(1, timeout=0)
    exported = export_task(client, "from", tmp_path / "out", namespace=namespace)
    assert (exported.groups, exported.archived) == (5, 2)
    assert [line["archived_ms"] is not None for line in lines_of(tmp_path / "out")][:3] == [
        *(True, True, False)
    ]
    assert audit(stream)["default"].leased.keys() == set(leased.ids)
    imported = import_task(client, "to", tmp_path / "out", namespace=namespace)
    assert (imported.groups, imported.archived) == (3, 2)
    back = ExperienceStream(client, "to", namespace=namespace)
    assert numbers(back.take(3, timeout=0)) == [2, 3, 4]


def test_groups_that_cannot_be_read_are_listed(
    client: Client, namespace: str, tmp_path: Path
) -> None:
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


def test_an_import_keeps_the_settings_of_an_existing_task(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    stream = ExperienceStream(client, "from", namespace=namespace, order="stalest", tags=["name"])
    stream.put(numbered(1), policy_version=3, tags={"name": "x"})
    stream.put(numbered(2), policy_version=1)
    export_task(client, "from", tmp_path / "out", namespace=namespace)
    plain = ExperienceStream(client, "plain", namespace=namespace)
    plain.put(numbered(0))
    import_task(client, "plain", tmp_path / "out", namespace=namespace)
    assert numbers(plain.take(3, timeout=0)) == [0, 1, 2]
    with pytest.raises(TaskMismatch):
        import_task(client, "plain", tmp_path / "out", namespace=namespace, order="lifo")
    import_task(client, "new", tmp_path / "out", namespace=namespace)
    new = ExperienceStream(client, "new", namespace=namespace)
    assert numbers(new.take(2, timeout=0)) == [2, 1]


def test_a_directory_that_is_in_the_way_is_refused(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no task"):
        export_task(client, "from", tmp_path / "out", namespace=namespace)
    ExperienceStream(client, "from", namespace=namespace).put(numbered(1))
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(ConfigError, match="there already"):
            export_task(client, "from", path, namespace=namespace)
    with pytest.raises(ConfigError, match="cannot be written"):
        export_task(client, "from", tmp_path / "none" / "out", namespace=namespace)
    with pytest.raises(ConfigError, match="cannot be read"):
        import_task(client, "to", tmp_path / "none", namespace=namespace)
    (tmp_path / "empty").mkdir()
    export_task(client, "from", tmp_path / "empty", namespace=namespace)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "unheard-of"}, "malformed"),
        ({"id": "1"}, "id"),
        ({"shard": "../tensors-00000.safetensors"}, "shard"),
        ({"shard": "tensors-00009.safetensors"}, "not a safetensors file"),
        ({"samples": []}, "samples"),
        ({"samples": [{"tensors": ["unknown"]}]}, "no tensor"),
        ({"samples": [{"tensors": [], "extras": {"x": {"$bytes": "!"}}}]}, "the form of no value"),
        ({"samples": [{"tensors": [], "policy_version": "1"}]}, "malformed"),
        ({"priority": "high"}, "priority"),
        ({"tags": []}, "tags"),
    ],
)
def test_a_malformed_directory_is_refused_before_anything_is_put(
    client: Client, namespace: str, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    stream = ExperienceStream(client, "from", namespace=namespace)
    stream.put(numbered(1))
    stream.put(numbered(2))
    out = tmp_path / "out"
    export_task(client, "from", out, namespace=namespace)
    first, second = lines_of(out)
    (out / "groups.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps({**second, **change})}\n")
    with pytest.raises(DecodeError, match=message):
        import_task(client, "to", out, namespace=namespace)
    assert len(ExperienceStream(client, "to", namespace=namespace)) == 0


def test_newer_exports_are_refused(client: Client, namespace: str, tmp_path: Path) -> None:
    (tmp_path / "export.json").write_text('{"format": 2}')
    with pytest.raises(DecodeError, match="upgrade"):
        import_task(client, "to", tmp_path, namespace=namespace)
    (tmp_path / "export.json").write_text("{")
    with pytest.raises(DecodeError, match="not JSON"):
        import_task(client, "to", tmp_path, namespace=namespace)


@pytest.mark.parametrize(
    "value", [{"$bytes": 1}, {"$time": "x"}, {"$float": "1"}, {"$a": 1, "b": 2}]
)
def test_json_that_stands_for_nothing(value: Any) -> None:
    with pytest.raises(DecodeError):
        from_json(value)


def test_extras_survive_json() -> None:
    text = json.dumps(to_json(EXTRAS), allow_nan=False)
    assert from_json(json.loads(text)) == EXTRAS
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    assert from_json(json.loads(json.dumps(to_json(deep)))) == deep
