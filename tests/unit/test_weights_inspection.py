"""Published weights in files."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from redrb.errors import ConfigError, EncodeError
from redrb.weights.files.safetensors import load_safetensors, save_safetensors
from redrb.weights.inspection.mapped_file import mapped_file
from redrb.weights.tensors.dtypes import dtype_of
from redrb.weights.tensors.published_state import lay_out
from redrb.weights.tensors.state import State
from redrb.weights.wire.layout import CHUNK_BYTES, ITEM_BYTES, Layout, Piece, TensorEntry


def layout_of(tensors: dict[str, Tensor]) -> Layout:
    return lay_out(tensors, CHUNK_BYTES)


def test_every_dtype_is_written_as_safetensors_reads_it(tmp_path: Path) -> None:
    known = [dtype for dtype in ITEM_BYTES if hasattr(torch, dtype)]
    without = {"float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"}
    tensors = {
        name: torch.randint(0, 2, (3, ITEM_BYTES[name]), dtype=torch.uint8)
        .view(getattr(torch, name))
        .reshape(3)
        for name in known
        if name not in without and not name.startswith("complex")
    }
    tensors |= {"scalar": torch.tensor(2.0), "empty": torch.empty(0, 4)}
    layout = layout_of(tensors)
    with mapped_file(tmp_path / "file", layout, metadata={"made": "here"}) as live:
        for name, tensor in live.items():
            tensor.copy_(tensors[name])
    found = load_safetensors(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor), name
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "made": "here"}


def test_a_state_is_received_straight_into_the_file(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(1_500_000), "b": torch.randn(7, 5), "c": torch.arange(9)}
    layout = layout_of(tensors)
    source = State(layout, tensors)
    with mapped_file(tmp_path / "file", layout, metadata={}) as live:
        state = State(layout, live)
        assert state.memory is None
        for index in range(layout.chunks):
            state.write(index, source.read(index))
    found = load_safetensors(tmp_path / "file")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_tied_tensors_are_one_in_the_file(tmp_path: Path) -> None:
    tied = torch.randn(3)
    layout = layout_of({"z": tied, "b": tied, "c": torch.zeros(2)})
    with mapped_file(tmp_path / "file", layout, metadata={"b": "x", "y": "c"}) as live:
        assert live["z"] is live["b"]
        live["z"].copy_(tied)
        live["c"].fill_(1)
    found = load_safetensors(tmp_path / "file")
    assert torch.equal(found["z"], tied)
    assert found["z"] is found["b"]
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "z": "b"}  # the rest would read as ties


def test_a_dtype_that_files_lack_is_refused_by_name(tmp_path: Path) -> None:
    entry = TensorEntry("odd", "complex128", (2,), (Piece((0,), (2,), 0),))
    assert dtype_of(entry) == torch.complex128
    with (
        pytest.raises(EncodeError, match="'odd' is complex128"),
        mapped_file(tmp_path / "file", Layout((entry,), 64, CHUNK_BYTES), metadata={}),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error_and_leaves_the_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "file").write_text("before")
    monkeypatch.setattr("os.posix_fallocate", full)
    with (
        pytest.raises(ConfigError, match="No space left"),
        mapped_file(tmp_path / "file", layout_of({"a": torch.zeros(3)}), metadata={}),
    ):
        pass
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("file", "before")]


def test_the_name_of_a_files_metadata_is_refused(tmp_path: Path) -> None:
    """A file with a tensor of this name was written, and nothing could read it."""
    state = {"__metadata__": torch.zeros(3)}
    with pytest.raises(EncodeError, match="__metadata__"):
        save_safetensors(tmp_path / "file", state)
    with (
        pytest.raises(EncodeError, match="__metadata__"),
        mapped_file(tmp_path / "file", layout_of(state), metadata={}),
    ):
        pass
    assert not list(tmp_path.iterdir())
