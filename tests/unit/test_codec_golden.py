"""The wire format does not change: golden files are equal to encoded samples, both ways.

`python -m tests.unit.test_codec_golden` writes the files anew. Do that only for a new version of
the format, and keep the files of old versions: they must stay readable.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest
import torch

from redrb.codec import decode_items, encode_groups, parse_group
from redrb.codec.dtypes import DTYPES
from redrb.codec.wire import PREFIX
from redrb.experience import BufferItem, Status
from tests.unit.codec_kernels import kernel  # noqa: F401 (used by every test)
from tests.unit.test_codec import assert_same, join, make

GOLDEN = Path(__file__).parent / "golden"


def plain() -> list[BufferItem]:
    """Eight fields, padding on the left, masks that are runs."""
    return [
        make(
            sequences=torch.tensor([0] * 20 + [11, 22, 333, 4444, 31_999]),
            action_log_probs=torch.tensor([-0.5, -1.25, -0.0]),
            values=torch.tensor([1.0, 2.0, float("nan")]),
            reward=torch.tensor(0.75),
            kl=torch.tensor(0.125),
            advantages=torch.tensor([0.0, 1.0, -1.0]),
            attention_mask=torch.tensor([0] * 20 + [1] * 5),
            action_mask=torch.tensor([True, True, False]),
            policy_version=7,
        )
    ]


def ragged() -> list[BufferItem]:
    """Samples of different lengths, one without some fields, with all the metadata."""
    return [
        make(
            sequences=torch.arange(100, 100 + length),
            reward=torch.tensor(float(length), dtype=torch.float64) if length != 5 else None,
            tensors={"pixels": torch.full((2, length), 200, dtype=torch.uint8)},
            policy_version=length,
            token_versions=torch.tensor([-1] * 17 + [length]),
            status=Status.COMPLETED if length != 5 else Status.ABORTED,
            group_id="prompt-π",
            tags={"level": length, "source": "math", "hard": length > 4, "score": 0.5},
            extras={"messages": [{"role": "user", "content": "1 + 1 = ?"}], "raw": b"\x00\xff"},
        )
        for length in (4, 5, 9)
    ]


def dtypes() -> list[BufferItem]:
    """Every dtype: 18 elements, the last 16 alike."""
    tensors = {}
    for dtype in DTYPES:
        head = torch.tensor([1, 0]).to(dtype.tensor)
        tensors[str(dtype.tensor)] = torch.cat([head, head[:1].expand(16)])
    return [make(tensors=tensors)]


def empty() -> list[BufferItem]:
    """Two samples with nothing in them."""
    return [make(), make()]


def narrow() -> list[BufferItem]:
    """Floats that another writer has stored as float16; redrb reads these, and writes none."""
    return [make(values=torch.tensor([1.0, 0.5, -2.0])), make(values=torch.tensor([65_504.0]))]


CASES: dict[str, Callable[[], list[BufferItem]]] = {
    own.__name__: own for own in (plain, ragged, dtypes, empty, narrow)
}


def encode(name: str) -> bytes:
    return join(encode_groups([CASES[name]()])[0])


def golden(name: str) -> bytes:
    return (GOLDEN / f"v1-{name}.bin").read_bytes()


@pytest.mark.parametrize("name", sorted({*CASES} - {"narrow"}))
def test_known_samples_have_known_bytes(name):
    assert encode(name) == golden(name)


@pytest.mark.parametrize("name", CASES)
def test_known_bytes_are_known_samples(name):
    assert_same(decode_items(parse_group(golden(name))), CASES[name]())


def test_every_byte_of_a_blob_is_as_documented():
    blob = golden("plain")
    assert blob[:16] == b"RDRB" + bytes([1, 0]) + bytes([33, 0, 24, 0, 0, 0, 0, 0, 0, 0])
    _, _, _, schema_bytes, header_bytes, _ = PREFIX.unpack_from(blob)
    body_at = 16 + schema_bytes + header_bytes
    schema = msgpack.unpackb(blob[16 : 16 + schema_bytes])
    header = msgpack.unpackb(blob[16 + schema_bytes : body_at])
    int64, uint16, float32, boolean = 4, 6, 10, 0
    assert schema == [
        [0, int64, uint16],
        *([field, float32, float32] for field in range(1, 6)),
        [6, int64, boolean],
        [7, boolean, boolean],
    ]
    runs_of_mask = [0, 20, 0]
    assert header == [1, [[0, 20, 0], 1, 1, 2, 2, 1, runs_of_mask, 1], [[25], [3], []], 7]
    body = blob[body_at:]
    assert body[:10] == b"\x0b\x00\x16\x00\x4d\x01\x5c\x11\xff\x7c"
    assert body[10:22] == bytes.fromhex("000000bf 0000a0bf 00000080")
    assert body[-2:] == bytes([0b11111, 0b011])
    assert len(body) == 10 + 12 + 12 + 4 + 4 + 12 + 1 + 1


if __name__ == "__main__":
    for case in {*CASES} - {"narrow"}:
        (GOLDEN / f"v1-{case}.bin").write_bytes(encode(case))
