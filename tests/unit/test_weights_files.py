"""Weights in safetensors files: written whole or not at all; tied tensors once; shards."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model, save_file, save_model
from torch import Tensor, nn

from redrb.errors import ConfigError, DecodeError, EncodeError
from redrb.weights.files.safetensors import iterate_safetensors, load_safetensors, save_safetensors


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.read.weight = self.embed.weight


@pytest.fixture
def path(tmp_path):
    yield tmp_path / "w.safetensors"
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_every_kind_of_tensor_comes_back(path):
    whole = torch.randn(6, 4)
    tensors = {
        "strided": whole.T,
        "part": whole[2:4],
        "rest": whole[4:],
        "flat": whole.view(-1),
        "columns": whole[:, 1:3],
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "also empty": torch.empty(0, 3),
        "bfloat16": torch.randn(3).bfloat16(),
        "float8": torch.randn(3).to(torch.float8_e4m3fn),
        "uint16": torch.tensor([65535], dtype=torch.uint16),
        "bool": torch.tensor([True, False]),
        "parameter": nn.Parameter(torch.randn(2)),
        "expanded": torch.ones(1).expand(4),
    }
    save_safetensors(path, tensors, metadata={"step": "12"})
    found = load_safetensors(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(-1), tensor.detach().reshape(-1)), name
        assert found[name].shape == tensor.shape
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "step": "12"}


def test_contiguous_parts_of_one_memory_are_written_without_a_copy(path):
    whole = torch.randn(4, 2)
    save_safetensors(path, {"b": whole[2:], "a": whole[:2]})
    found = load_safetensors(path)
    assert torch.equal(torch.cat([found["a"], found["b"]]), whole)


def test_tied_tensors_are_written_once_as_hugging_face_does(path, tmp_path):
    model = Tied()
    save_safetensors(path, model.state_dict())
    save_model(model, str(tmp_path / "theirs"))
    for file in (path, tmp_path / "theirs"):
        with safe_open(file, framework="pt") as opened:
            assert list(opened.keys()) == ["embed.weight"]
            assert opened.metadata()["read.weight"] == "embed.weight"
        found = load_safetensors(file)
        assert list(found) == ["embed.weight", "read.weight"]
        assert found["read.weight"] is found["embed.weight"]
        assert torch.equal(found["read.weight"], model.read.weight)
    other = Tied()
    load_model(other, str(path))
    assert torch.equal(other.read.weight, model.read.weight)


def test_files_have_the_mode_of_any_new_file(path, tmp_path):
    save_safetensors(path, {"a": torch.zeros(2)})
    (tmp_path / "any").touch()
    assert path.stat().st_mode == (tmp_path / "any").stat().st_mode


def test_metadata_that_reads_as_a_tie_is_refused(path):
    state = Tied().state_dict()
    for metadata in ({"read.weight": "x"}, {"author": "embed.weight"}, {"step": 12}):
        with pytest.raises(ConfigError, match="metadata"):
            save_safetensors(path, state, metadata=metadata)
    assert not path.exists()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, dtype=torch.complex128),
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
    ],
)
def test_tensors_without_plain_bytes_are_refused_by_name(path, tensor):
    with pytest.raises(EncodeError, match="'odd'"):
        save_safetensors(path, {"fine": torch.zeros(1), "odd": tensor})
    assert not path.exists()


def test_a_file_is_replaced_whole_or_not_at_all(path, monkeypatch):
    save_safetensors(path, {"a": torch.zeros(2)})
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(ConfigError, match="disk full"):
        save_safetensors(path, {"a": torch.ones(2)})
    assert torch.equal(load_safetensors(path)["a"], torch.zeros(2))
    monkeypatch.undo()
    save_safetensors(path, {"a": torch.ones(2)})
    assert torch.equal(load_safetensors(path)["a"], torch.ones(2))
    with pytest.raises(ConfigError, match="cannot be written"):
        save_safetensors(path / "x" / "y", {"a": torch.ones(2)})


def sharded(folder: Path) -> dict[str, Tensor]:
    """Write what Hugging Face's `save_pretrained` writes, with a tie in the second shard."""
    tensors = {f"layers.{i}.weight": torch.full((2, 2), float(i)) for i in range(4)}
    places = {}
    for shard in range(2):
        name = f"model-0000{shard + 1}-of-00002.safetensors"
        own = {f"layers.{i}.weight": tensors[f"layers.{i}.weight"] for i in (shard, shard + 2)}
        ties = {"tied.weight": "layers.3.weight"} if shard else {}
        save_file({**own, f"extra{shard}": torch.zeros(1)}, folder / name, metadata=ties)
        places |= dict.fromkeys(own, name)
    index = {"metadata": {"total_size": 64}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return {**tensors, "tied.weight": tensors["layers.3.weight"]}


def test_shards_are_opened_one_after_another(tmp_path):
    expected = sharded(tmp_path)
    tensors = iterate_safetensors(tmp_path)
    assert [next(tensors)[0] for _ in range(2)] == ["layers.0.weight", "layers.2.weight"]
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        next(tensors)
    with pytest.raises(DecodeError, match=r"00002.* is missing"):
        next(iterate_safetensors(tmp_path))
    sharded(tmp_path)
    found = load_safetensors(tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_folder_may_hold_one_file(tmp_path):
    with pytest.raises(ConfigError, match="has neither"):
        iterate_safetensors(tmp_path)
    save_safetensors(tmp_path / "model.safetensors", {"a": torch.ones(2)})
    assert list(load_safetensors(tmp_path)) == ["a"]


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/passwd", "", ".", "a/../../x", "a\0b", 3, None]
)
def test_shards_stay_inside_the_folder(tmp_path, shard):
    folder = tmp_path / "folder"
    folder.mkdir()
    save_safetensors(tmp_path / "x.safetensors", {"a": torch.ones(2)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(DecodeError, match="inside the folder"):
        next(iterate_safetensors(folder))


def test_links_of_the_hugging_face_cache_are_followed(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    expected = sharded(tmp_path / "blobs")
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert load_safetensors(tmp_path / "snapshot").keys() == expected.keys()


def test_damaged_files_are_refused(path, tmp_path):
    save_safetensors(path, {"a": torch.ones(2)})
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:20], b"\xff" * 64):
        path.write_bytes(damaged)
        with pytest.raises(DecodeError, match="not a whole"):
            load_safetensors(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_safetensors(tmp_path / "missing")
    path.write_bytes(whole)
    index = tmp_path / "model.safetensors.index.json"
    for text in ("{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"b": "w.safetensors"}}'):
        index.write_text(text)
        with pytest.raises(DecodeError):
            load_safetensors(tmp_path)


def test_without_safetensors_the_error_says_what_to_install(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for call in (
        lambda: save_safetensors(path, {"a": torch.ones(1)}),
        lambda: load_safetensors(path),
        lambda: iterate_safetensors(path),
    ):
        with pytest.raises(ConfigError, match=r"pip install 'safetensors>="):
            call()


def test_the_name_of_a_files_metadata_is_refused(tmp_path):
    """A file with a tensor of this name was written, and nothing could read it."""
    with pytest.raises(EncodeError, match="__metadata__"):
        save_safetensors(tmp_path / "file", {"__metadata__": torch.zeros(3)})
    assert not list(tmp_path.iterdir())
