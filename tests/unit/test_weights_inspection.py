"""Published weights in files, and the comparison of versions."""

from __future__ import annotations

import errno
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from redrb.errors import ConfigError, EncodeError
from redrb.weights.files.safetensors import load_safetensors, save_safetensors
from redrb.weights.inspection.comparison import compare
from redrb.weights.inspection.mapped_file import mapped_file
from redrb.weights.tensors.dtypes import dtype_of
from redrb.weights.tensors.published_state import lay_out
from redrb.weights.tensors.shard import TensorShard
from redrb.weights.tensors.state import State
from redrb.weights.wire.layout import CHUNK_BYTES, ITEM_BYTES, Layout, Piece, TensorEntry


def layout_of(tensors: dict[str, Tensor]) -> Layout:
    whole = {name: TensorShard.whole(tensor) for name, tensor in tensors.items()}
    return lay_out(whole, CHUNK_BYTES)


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


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]
)
def test_changes_are_counted_and_measured(dtype: torch.dtype) -> None:
    old = torch.tensor([0.0, 1.0, 2.0, -4.0, 8.0]).to(dtype)
    new = torch.tensor([3.0, 1.0, 4.0, -4.0, 6.0]).to(dtype)
    change = compare("a", old, new)
    assert (change.elements, change.changed, change.share) == (5, 3, 0.6)
    assert (change.largest, change.largest_relative) == (3.0, 3 / 8)  # the largest before was 8
    assert change.norm == pytest.approx(math.sqrt(9 + 4 + 4))


def test_tensors_of_every_dtype_are_compared() -> None:
    for name in ITEM_BYTES:
        if not hasattr(torch, name):
            continue
        old = torch.zeros(20 * ITEM_BYTES[name], dtype=torch.uint8)
        new = old.clone()
        new[0] = 1
        dtype = getattr(torch, name)
        change = compare("a", old.view(dtype), new.view(dtype))
        assert (change.changed, change.elements) == (1, 20), name


def test_bits_are_compared_and_infinite_values_left_out() -> None:
    nan, inf = math.nan, math.inf
    old = torch.tensor([nan, 0.0, inf, 1.0, 2.0])
    new = torch.tensor([nan, -0.0, 1.0, nan, 2.5])
    change = compare("a", old, new)
    assert (change.changed, change.not_finite) == (4, 2)
    assert (change.largest, change.largest_relative, change.norm) == (0.5, 0.25, 0.5)


def test_a_change_near_zero_is_small_beside_the_tensor() -> None:
    old = torch.tensor([1e-9, -2.0, 0.5])
    change = compare("a", old, old + torch.tensor([1e-4, 0.0, 0.0]))
    assert change.largest_relative == pytest.approx(5e-5, rel=1e-3)
    assert compare("a", torch.zeros(2), torch.tensor([0.0, 1.0])).largest_relative == math.inf


def test_large_and_odd_tensors_are_compared() -> None:
    old = torch.zeros(3 << 20)
    new = old.clone()
    new[::1000] = 2.0
    change = compare("a", old, new)
    assert change.changed == len(new[::1000])
    assert change.norm == pytest.approx(2 * math.sqrt(change.changed))
    assert compare("a", torch.empty(0, 3), torch.empty(0, 3)).share == 0.0
    assert compare("a", torch.tensor(True), torch.tensor(False)).changed == 1
    complex_ = torch.tensor([3 + 4j, 1j]), torch.tensor([0j, 1j])
    for dtype in (torch.complex64, torch.complex128):
        change = compare("a", *(part.to(dtype) for part in complex_))
        assert (change.changed, change.largest, change.largest_relative) == (1, 5.0, 1.0)


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
