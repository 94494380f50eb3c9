"""The commands `redrb weights ...`: their output, files, versions and exit status."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import redrb
from redrb.cli.__main__ import main
from redrb.connection import Client
from redrb.errors import PublisherFenced, WeightError
from redrb.watch.state.reader import StateReader
from redrb.weights.files.adapter_folder import load_adapter
from redrb.weights.files.safetensors import load_safetensors, save_safetensors
from redrb.weights.inspection import file_transfer
from redrb.weights.inspection.listing import kept_version, versions_of
from redrb.weights.wire.lora_config import LoraConfig
from tests.clusters import RedisCluster
from tests.servers import programs

Run = Callable[..., tuple[int, str, str]]

on_one_server = pytest.mark.parametrize("real_url", list(programs())[:1], indirect=True)
pytestmark = on_one_server


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read = nn.Embedding(500, 300), nn.Linear(300, 500, bias=False)
        self.read.weight = self.embed.weight
        self.norm = nn.LayerNorm(300)
        self.register_buffer("steps", torch.tensor(3))


@pytest.fixture
def run(real_url: str, namespace: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process; returns its status, and what it said to whom."""

    def called(*arguments: object) -> tuple[int, str, str]:
        words = ["weights", *map(str, arguments)]
        if "--url" not in words:
            words += ["--url", real_url]
        if "--namespace" not in words:
            words += ["--namespace", namespace]
        capsys.readouterr()
        status = main(words)
        said = capsys.readouterr()
        return status, said.out, said.err

    return called


def json_of(run: Run, *arguments: object) -> Any:
    status, out, err = run(*arguments, "--json")
    assert status == 0, err
    (line,) = out.splitlines()
    return json.loads(line)


def publish(store: Client, namespace: str, model: Tied, *, versions: int = 2) -> list[Any]:
    """Publish versions of a model in which ten weights change each time."""
    publisher = redrb.WeightPublisher(store, "policy", namespace=namespace, keep=5)
    published = [publisher.publish(model)]
    for _ in range(versions - 1):
        with torch.no_grad():
            model.embed.weight[0, :10] += 0.5
        published.append(publisher.publish(model))
    return published


ADAPTER: tuple[dict[str, Tensor], dict[str, LoraConfig]] = (
    {"a.lora_A": torch.randn(2, 5), "a.lora_B": torch.randn(7, 2)},
    {"a": LoraConfig(2, 4.0)},
)


def test_published_weights_are_listed(store: Client, namespace: str, run: Run) -> None:
    model = Tied()
    publish(store, namespace, model, versions=3)
    redrb.WeightPublisher(store, "adapter", namespace=namespace).publish_lora(ADAPTER)
    redrb.WeightPublisher(store, "never", namespace=namespace)
    redrb.WeightPublisher(store, "other", namespace=f"{namespace}-2").publish(model)

    found = json_of(run, "ls")
    assert [weights["name"] for weights in found] == ["adapter", "policy"]
    assert [weights["kind"] for weights in found] == ["lora", "delta"]
    policy = found[1]
    assert (policy["version"], policy["versions"]) == (3, 3)
    full = policy["nbytes"]
    assert full < policy["stored_bytes"] < 1.01 * full
    assert 0 <= policy["age_s"] < 60
    state = StateReader(store, namespace).look()  # as `redrb top` and the page show it
    assert [each | {"age_s": 0} for each in found] == [
        asdict(replace(each, age_s=0)) for each in state.weights
    ]
    _, out, _ = run("ls")
    head, adapter, shown = out.splitlines()
    assert head.split()[:4] == ["WEIGHTS", "(2)", "version", "kind"]
    assert adapter.split()[:5] == ["adapter", "1", "lora", "128", "B"]
    assert shown.split()[:5] == ["policy", "3", "delta", "602.5", "kB"]

    status, out, err = run("ls", "--namespace", "empty")
    assert (status, out) == (0, "")
    assert "no weights are published in namespace 'empty'" in err


def test_chunks_that_versions_share_are_counted_once(
    store: Client, namespace: str, run: Run
) -> None:
    publisher = redrb.WeightPublisher(store, "policy", namespace=namespace, anchor_every=1)
    frozen, head = torch.randn(3 << 20), torch.zeros(10)
    for number in range(2):
        publisher.publish({"frozen": frozen, "head": head + number})
    (found,) = json_of(run, "ls")
    assert found["kind"] == "full"
    in_redis = sum(
        store.execute("STRLEN", key)
        for key in store.execute("KEYS", f"redrb:{{{namespace}:weights:policy}}:chunk:*")
    )
    delta = versions_of(store, "policy", namespace)[-1].delta_bytes or 0
    assert found["stored_bytes"] == in_redis + delta


def test_versions_and_tensors_are_shown(store: Client, namespace: str, run: Run) -> None:
    published = publish(store, namespace, Tied())
    shown = json_of(run, "show", "policy")
    assert shown["name"] == "policy"
    first, second = shown["versions"]
    assert (first["kind"], first["base"], first["delta_bytes"]) == ("full", 0, None)
    assert (second["kind"], second["base"]) == ("delta", 1)
    assert second["delta_bytes"] == published[1].delta_bytes
    _, out, _ = run("show", "policy")
    assert [line.split()[0] for line in out.splitlines()] == ["version", "1", "2"]

    tensors = json_of(run, "show", "policy", "--tensors")
    assert tensors["version"] == 2
    by_name = {tensor["name"]: tensor for tensor in tensors["tensors"]}
    assert by_name["read.weight"]["tied_to"] == "embed.weight"
    assert by_name["norm.bias"] == {
        "name": "norm.bias",
        "dtype": "float32",
        "shape": [300],
        "tied_to": None,
        "nbytes": 1200,
    }
    _, out, _ = run("show", "policy", "--version", 1)
    assert "read.weight   float32  [500, 300]  600,000  embed.weight" in out


def test_a_version_goes_to_a_file_and_back(
    store: Client, namespace: str, run: Run, tmp_path: Path
) -> None:
    model = Tied()
    publish(store, namespace, model)
    file = tmp_path / "policy.safetensors"
    got = json_of(run, "get", "policy", file)
    assert (got["version"], got["kind"], got["tensors"]) == (2, "delta", 5)
    found = load_safetensors(file)
    state = model.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert found["read.weight"] is found["embed.weight"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["policy.safetensors"]

    status, out, err = run("put", "policy", file)
    assert (status, out.splitlines()[1].split()) == (0, ["version", "3"])
    assert "took over" in err
    assert "PublisherFenced" in err
    assert "took over" not in run("put", "new", file)[2]
    subscriber = redrb.WeightSubscriber(store, "policy", namespace=namespace)
    copy = Tied()
    subscriber.poll(copy)
    assert copy.read.weight is copy.embed.weight
    assert torch.equal(copy.embed.weight, model.embed.weight)
    assert [version.version for version in subscriber.versions()] == [1, 2, 3]  # 2 stands on 1

    assert json_of(run, "put", "policy", file, "--dtype", "bfloat16", "--keep", 7)["version"] == 4
    assert len(subscriber.versions()) == 4
    assert subscriber.fetch()["norm.bias"].dtype == torch.bfloat16
    assert json_of(run, "get", "policy", file, "--version", 2)["version"] == 2
    assert load_safetensors(file)["norm.bias"].dtype == torch.float32


def test_a_running_publisher_is_fenced_by_a_put(
    store: Client, namespace: str, run: Run, tmp_path: Path
) -> None:
    publisher = redrb.WeightPublisher(store, "policy", namespace=namespace)
    publisher.publish({"a": torch.zeros(3)})
    save_safetensors(tmp_path / "file", {"a": torch.ones(3)})
    assert json_of(run, "put", "policy", tmp_path / "file")["took_over"] is True
    with pytest.raises(PublisherFenced):
        publisher.publish({"a": torch.zeros(3)})


def test_a_put_keeps_the_versions_that_are_there(
    store: Client, namespace: str, run: Run, tmp_path: Path
) -> None:
    publisher = redrb.WeightPublisher(store, "policy", namespace=namespace, keep=5, deltas=False)
    for number in range(4):
        publisher.publish({"a": torch.full((3,), float(number))})
    save_safetensors(tmp_path / "file", {"a": torch.ones(3)})
    status, out, _ = run("put", "policy", tmp_path / "file")
    assert (status, "dropped" in out) == (0, False)
    versions = redrb.WeightSubscriber(store, "policy", namespace=namespace).versions
    assert [version.version for version in versions()] == [1, 2, 3, 4, 5]
    status, out, _ = run("put", "policy", tmp_path / "file", "--keep", 3)
    assert (status, out.splitlines()[5].split(maxsplit=1)) == (0, ["dropped", "1, 2, 3"])
    assert [version.version for version in versions()] == [4, 5, 6]
    assert json_of(run, "put", "policy", tmp_path / "file", "--keep", 3)["dropped"] == [4]
    assert json_of(run, "put", "policy", tmp_path / "file")["dropped"] == []


def test_a_file_that_cannot_be_read_fences_nobody(
    store: Client, namespace: str, run: Run, tmp_path: Path
) -> None:
    publisher = redrb.WeightPublisher(store, "policy", namespace=namespace)
    publisher.publish({"a": torch.zeros(3)})
    (tmp_path / "file").write_bytes(b"not tensors")
    assert run("put", "policy", tmp_path / "file")[0] == 2
    assert run("put", "policy", tmp_path / "none")[0] == 2
    save_safetensors(tmp_path / "file", {"a": torch.zeros(3)})
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:-1])
    status, _, err = run("put", "policy", tmp_path / "file")
    assert (status, "is not a whole safetensors file" in err) == (1, True)
    assert publisher.publish({"a": torch.ones(3)}).version == 2


def test_a_folder_of_shards_is_put(store: Client, namespace: str, run: Run, tmp_path: Path) -> None:
    save_safetensors(tmp_path / "1.safetensors", {"a": torch.arange(3)})
    save_safetensors(tmp_path / "2.safetensors", {"b": torch.ones(2, 2)})
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert json_of(run, "put", "policy", tmp_path)["tensors"] == 2
    found = redrb.WeightSubscriber(store, "policy", namespace=namespace).fetch()
    assert torch.equal(found["a"], torch.arange(3))
    assert torch.equal(found["b"], torch.ones(2, 2))


def test_an_adapter_goes_to_a_folder_and_back(
    store: Client, namespace: str, run: Run, tmp_path: Path
) -> None:
    publisher = redrb.WeightPublisher(store, "adapter", namespace=namespace)
    publisher.publish_lora(ADAPTER)
    folder = tmp_path / "adapter"
    assert json_of(run, "get", "adapter", folder, "--base-model", "tiny/one")["kind"] == "lora"
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 2
    assert "tiny/one" in (folder / "adapter_config.json").read_text()
    put = json_of(run, "put", "adapter", folder)
    assert (put["version"], put["kind"]) == (2, "lora")
    shutil.rmtree(folder)
    json_of(run, "get", "adapter", folder)
    tensors, configs = load_adapter(folder)
    assert configs == ADAPTER[1]
    assert all(torch.equal(tensors[name], ADAPTER[0][name]) for name in ADAPTER[0])


def test_an_error_is_one_line(store: Client, namespace: str, run: Run, tmp_path: Path) -> None:
    assert "and no others: --namespace names" in run("show", "nothing")[2]
    publish(store, namespace, Tied())
    publisher = redrb.WeightPublisher(store, "mixed", namespace=namespace)
    publisher.publish({"a": torch.zeros(3)})
    publisher.publish_lora(ADAPTER)
    torch.save({"a": torch.zeros(3)}, tmp_path / "t.pt")
    for arguments, words in (
        (("show", "polisy"), "there are mixed, policy"),
        (("show", "polisy", "--namespace", "x"), "and no others: --namespace names"),
        (
            ("show", "policy", "--version", 9),
            "version 9 of weights 'policy' is not kept; kept are 1, 2.",
        ),
        (("get", "polisy", tmp_path / "x"), "there are mixed, policy"),
        (("get", "policy", tmp_path / "x", "--version", 3), "kept are 1, 2"),
        (("get", "policy", tmp_path / "no" / "x"), f"x cannot be written: {tmp_path}/no does not"),
        (("get", "policy", tmp_path), f"{tmp_path} is a folder: give the name of a file"),
        (("get", "policy", tmp_path / "t.pt" / "x"), f"{tmp_path}/t.pt is no folder"),
        (("get", "mixed", tmp_path / "x.safetensors"), "an adapter is saved as a folder"),
        (
            ("put", "policy", tmp_path / "none"),
            f": {tmp_path}/none cannot be read: it does not exis",
        ),
        (("put", "policy", tmp_path / "t.pt"), "t.pt is no safetensors file. Give one"),
        (("rm", "polisy"), "there are mixed, policy"),
        (("put", "policy", tmp_path), "model.safetensors"),
        (("put", "po licy", tmp_path), "model.safetensors"),
        (("show", "po licy"), "is not usable"),
    ):
        status, out, err = run(*arguments)
        assert (status, out) == (2, ""), (arguments, out, err)
        assert words in err
        assert err.count("\n") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.pt"]


def test_a_cluster_lists_the_weights_of_all_primaries(
    real_url: str, namespace: str, run: Run, tmp_path: Path
) -> None:
    cluster = RedisCluster(next(iter(programs().values())))
    try:
        names = [f"w{number}" for number in range(8)]
        with redrb.connect(cluster.url) as client:
            for name in names:
                publisher = redrb.WeightPublisher(client, name, namespace=namespace)
                publisher.publish({"a": torch.arange(5.0)})
            served = [primary.run("DBSIZE") for primary in cluster.primaries]
            assert all(served)
        assert [w["name"] for w in json_of(run, "ls", "--url", cluster.url)] == names
        for name in names:
            json_of(run, "get", name, tmp_path / name, "--url", cluster.url)
            assert torch.equal(load_safetensors(tmp_path / name)["a"], torch.arange(5.0))
        assert json_of(run, "put", "w0", tmp_path / "w1", "--url", cluster.url)["version"] == 2
    finally:
        cluster.close()


def test_a_version_that_goes_while_it_is_fetched_is_reported(
    real_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redrb.connect(real_url) as client:
        publisher = redrb.WeightPublisher(client, "w", namespace=namespace, keep=1, deltas=False)
        publisher.publish({"a": torch.zeros(4)})

        def checked(*arguments: Any) -> redrb.WeightVersion:
            monkeypatch.undo()
            newest = kept_version(*arguments)
            publisher.publish({"a": torch.ones(4)})  # the trainer commits just now
            return newest

        monkeypatch.setattr(file_transfer, "kept_version", checked)
        with pytest.raises(WeightError, match="no version 1 of weights 'w' to fetch"):
            file_transfer.get_weights(client, "w", tmp_path / "w.safetensors", namespace=namespace)
    assert not list(tmp_path.iterdir())
