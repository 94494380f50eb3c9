"""Parts of browsing: PNG files, numbers that numpy lacks, text of tokens, what terminals get."""

from __future__ import annotations

import io
import json
import math
import zlib
from pathlib import Path

import msgpack
import numpy as np
import pytest
import tokenizers
import torch

from redrb import BufferItem
from redrb.cli.group_screen import everything
from redrb.codec import encode_groups
from redrb.errors import ConfigError
from redrb.watch.groups import Tokenizer
from redrb.watch.groups.calls import Browsed
from redrb.watch.groups.choice import LIMITS, Limits
from redrb.watch.groups.records import GroupView, SampleView, TokensView, as_json
from redrb.watch.groups.samples import Samples
from redrb.watch.groups.values import PlainValues, images_of


def png_pixels(data: bytes) -> np.ndarray:
    """Decode a PNG without filters, as the encoder writes it; checks all checksums."""
    file, chunks = io.BytesIO(data), {}
    assert file.read(8) == b"\x89PNG\r\n\x1a\n"
    while head := file.read(8):
        length, kind = int.from_bytes(head[:4], "big"), head[4:]
        body = file.read(length)
        assert int.from_bytes(file.read(4), "big") == zlib.crc32(kind + body)
        chunks[kind] = body
    width, height = (int.from_bytes(chunks[b"IHDR"][at : at + 4], "big") for at in (0, 4))
    channels = {0: 1, 2: 3, 6: 4}[chunks[b"IHDR"][9]]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, channels)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_of_both_orders_are_png_files_with_the_same_pixels(channels: int) -> None:
    pixels = np.arange(7 * 5 * channels, dtype=np.uint8).reshape(7, 5, channels)
    for array in (pixels, pixels.transpose(2, 0, 1)):
        (image,) = images_of("screen", array, LIMITS)
        assert (image.width, image.height) == (5, 7)
        assert (png_pixels(image.png) == pixels).all()


def test_other_tensors_are_no_images_and_large_ones_are_made_smaller() -> None:
    for shape in ((7, 5), (7, 5, 2), (3, 1, 9), (2, 2, 2, 2, 3)):
        assert images_of("x", np.zeros(shape, np.uint8), LIMITS) == []
    assert images_of("x", np.zeros((3, 8, 8), np.int64), LIMITS) == []
    (small,) = images_of("x", np.zeros((1000, 10, 3), np.uint8), Limits(pixels=100))
    assert small.width * small.height <= 100
    several = images_of("x", np.zeros((20, 3, 8, 8), np.uint8), LIMITS)
    assert [image.name for image in several] == [f"x[{number}]" for number in range(8)]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.uint16]
)
def test_all_values_of_a_dtype_are_read_as_torch_reads_them(dtype: torch.dtype) -> None:
    bits = 8 * dtype.itemsize
    codes = torch.arange(2**bits, dtype=torch.int32)
    tensor = codes.to(torch.uint8 if bits == 8 else torch.uint16).view(dtype)
    item = BufferItem(None, None, tensors={"all": tensor})
    blob = encode_groups([[item]])[0].blob
    ((view, array),) = Samples(blob, LIMITS)._arrays(0)
    expected = tensor.float().numpy()
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(array.astype(np.float32), expected)
    assert view.not_finite == int((~np.isfinite(expected)).sum())


def test_values_of_extras_are_cut_and_bounded_together() -> None:
    plain = PlainValues(Limits(text=10, entries=5))
    assert plain.of("a" * 10) == "a" * 10
    assert plain.of("a" * 11) == "a" * 10 + "… (11 characters)"
    assert plain.of([1, 2, 3, 4]) == [1, 2, 3, 4]
    assert plain.of([1, 2]) == [1]
    assert plain.cut == 2


@pytest.fixture
def byte_tokenizer() -> Tokenizer:
    """A tokenizer with one token a byte, so that characters take several."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend)


def test_pieces_of_tokens_are_the_text_together(byte_tokenizer: Tokenizer) -> None:
    text = "a é 日本 🙂!"
    ids = byte_tokenizer._backend.encode(text).ids
    pieces = byte_tokenizer.pieces(ids)
    assert len(pieces) == len(ids) == len(text.encode())
    assert "".join(pieces) == text == byte_tokenizer.text(ids)
    assert byte_tokenizer.pieces([-1, 2**40]) == ["", ""]


def test_a_response_without_text_says_why(byte_tokenizer: Tokenizer) -> None:
    def notes(sequences: list[int] | None, actions: int) -> list[str]:
        item = BufferItem(
            sequences=None if sequences is None else torch.tensor(sequences),
            action_log_probs=torch.zeros(actions) if actions else None,
            tensors={"x": torch.zeros(1)},
        )
        samples = Samples(encode_groups([[item]])[0].blob, LIMITS)
        samples.views(byte_tokenizer)
        return samples.notes

    assert notes([1, 2, 3], 2) == []
    (unknown,) = notes([1, 99_999, 2, 99_999], 2)
    assert unknown.startswith("2 of 4 token ids, such as 99999, are not in the vocabulary")
    (missing,) = notes(None, 0)
    assert "no token ids (sequences)" in missing
    (empty,) = notes([1, 2], 0)
    assert "tells which tokens are the response: it is empty" in empty


@pytest.mark.parametrize("strange", [math.inf, -math.inf, math.nan])
def test_numbers_of_records_that_json_lacks_are_left_out(strange: float) -> None:
    names = ("version", "newest", "samples", "size", "priority")
    facts = {"status": "completed", **dict.fromkeys(names, strange), "tags": {"a": strange}}
    group = Browsed(1, "waiting", reads=0, failed=0, status="completed")
    view = group.view(msgpack.packb(facts))
    assert (view.size, view.oldest_version) == (0, None)
    assert (view.samples_total, view.newest_version, view.priority, view.tags) == (
        0,
        None,
        None,
        {"a": None},
    )
    json.dumps(as_json(view), allow_nan=False)


def test_ids_of_tokens_are_shown_whole_and_long_texts_cut() -> None:
    tokens = TokensView(prompt_ids=(151_643,), response_ids=(100_000,), log_probs=(-0.123456,))
    sample = SampleView(0, "completed", None, None, tags={"a": "x" * 9_999}, tokens=tokens)
    view = GroupView(1, "waiting", samples_total=1, samples=(sample,), group_id="p" * 9_999)
    lines = [each.plain for each in everything(view)]
    assert lines[0] == "group 1 · waiting · 1 sample · 0 B"
    assert "  prompt     151643" in lines
    assert "  response   100000" in lines
    assert "  log-probs  -0.1235" in lines
    assert max(map(len, lines)) < 5_000


def test_a_tokenizer_is_a_file_or_a_folder_and_nothing_else(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    byte_tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenization_evil.py").write_text("raise SystemExit")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert Tokenizer.open(path).text(byte_tokenizer._backend.encode("hi").ids) == "hi"
    for wrong in (tmp_path / "none", tmp_path / "tokenization_evil.py"):
        with pytest.raises(ConfigError, match="tokenizer"):
            Tokenizer.open(wrong)
