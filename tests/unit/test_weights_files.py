"""Weights in safetensors files: written whole or not at all; tied tensors; shards."""

from __future__ import annotations

import json
import random
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


@pytest.mark.parametrize("seed", range(8))
def test_tied_tensors_are_under_each_of_their_names_and_tied_again_when_they_are_read(path, seed):
    dice = random.Random(seed)
    owned = {f"own.{n}": torch.randn(dice.randint(2, 4), 3) for n in range(4)}
    tied = {f"{dice.choice('az')}.{n}": owned[f"own.{dice.randrange(4)}"] for n in range(5)}
    views = {"row": owned["own.0"][:1], "transposed": owned["own.1"].t()}
    tensors = dict(dice.sample([*(owned | tied | views).items()], 11))
    save_safetensors(path, tensors)
    with safe_open(path, framework="pt") as opened:
        assert set(opened.keys()) == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(opened.get_tensor(name), tensor)
    found = load_safetensors(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
        for other in tensors:
            assert (found[name] is found[other]) is (tensor is tensors[other])


def test_a_tied_model_that_safetensors_has_written_is_read(path):
    model = Tied()
    save_model(model, str(path))
    found = load_safetensors(path)
    assert found["read.weight"] is found["embed.weight"]
    save_safetensors(path, model.state_dict())
    other = Tied()
    load_model(other, str(path), strict=False)
    assert torch.equal(other.read.weight, model.read.weight)


@pytest.mark.parametrize(
    "other", [torch.ones(2), torch.zeros(3), torch.zeros(2, dtype=torch.int32), -torch.zeros(2)]
)
def test_a_header_that_ties_other_bytes_is_not_believed(path, other):
    save_file({"a": torch.zeros(2), "b": other}, path, metadata={"b": "a", "a": "b", "c": "c"})
    found = load_safetensors(path)
    assert found.keys() == {"a", "b"}
    assert found["b"].dtype == other.dtype
    assert torch.equal(found["b"], other)
    assert torch.equal(torch.signbit(found["b"]), torch.signbit(other))


def test_transformers_reads_a_tied_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    config.save_pretrained(tmp_path)
    save_safetensors(tmp_path / "model.safetensors", model.state_dict())
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(found(tokens).logits, model(tokens).logits)


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
