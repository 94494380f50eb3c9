"""Manifests: what is written is read back, and nothing hostile gets through."""

from __future__ import annotations

import random

import msgpack
import pytest

from redrb.errors import DecodeError
from redrb.weights.layout import Layout, TensorEntry
from redrb.weights.manifest import Manifest, decode_manifest, encode_manifest

ENTRIES = (
    TensorEntry("embed", "bfloat16", (10, 30), 0),
    TensorEntry("scale", "float32", (), 640),
    TensorEntry("none", "int64", (0, 7), 704),
    TensorEntry("head", "bfloat16", (10, 30), 0, alias="embed"),
)
MANIFEST = Manifest(7, 3, Layout(ENTRIES, 704, 256), (1, 2**64 - 1, 0))


def test_what_is_written_is_read_back():
    assert decode_manifest(encode_manifest(MANIFEST)) == MANIFEST


def test_description_counts_tied_tensors_by_each_name():
    described = MANIFEST.describe("actor", 12.5)
    assert (described.version, described.tensors, described.chunks, described.nbytes) == (
        (7, 4, 3, 704)
    )


def test_spans_cover_each_stored_byte_once():
    covered = [
        (index * 256 + span.in_chunk, span.nbytes)
        for index, spans in enumerate(MANIFEST.layout.spans())
        for span in spans
    ]
    assert covered == [(0, 256), (256, 256), (512, 88), (640, 4)]


def test_unknown_keys_are_ignored():
    fields = msgpack.unpackb(encode_manifest(MANIFEST))
    fields["later"] = {"more": [1]}
    assert decode_manifest(msgpack.packb(fields)) == MANIFEST


def tensor(**changes):
    return {"name": "a", "dtype": "uint8", "shape": [64], "offset": 0} | changes


HOSTILE = {
    "later format": {"format": 2},
    "later kind": {"kind": "delta"},
    "version zero": {"version": 0},
    "version as bool": {"version": True},
    "version too large": {"version": 2**53},
    "token as text": {"token": "1:2:3"},
    "negative bytes": {"nbytes": -1},
    "more bytes than checksums": {"nbytes": 2**50},
    "bytes without tensors": {"nbytes": 768},
    "no chunk size": {"chunk_bytes": 0},
    "tiny chunks": {"nbytes": 2**40, "chunk_bytes": 1},
    "huge chunks": {"chunk_bytes": 2**30},
    "checksums cut": {"checksums": b"\0" * 23},
    "checksums as list": {"checksums": [1, 2, 3]},
    "tensors as map": {"tensors": {}},
    "tensor as list": {"tensors": [["a", "uint8", [64], 0]]},
    "unknown dtype": {"tensors": [tensor(dtype="object")]},
    "dtype as list": {"tensors": [tensor(dtype=["uint8"])]},
    "no name": {"tensors": [tensor(name="")]},
    "name as bytes": {"tensors": [tensor(name=b"a")]},
    "long name": {"tensors": [tensor(name="a" * 1025)]},
    "same name twice": {"tensors": [tensor(), tensor(offset=64)]},
    "negative size": {"tensors": [tensor(shape=[-64])]},
    "size as float": {"tensors": [tensor(shape=[64.0])]},
    "too many dimensions": {"tensors": [tensor(shape=[1] * 65)]},
    "product overflows": {"tensors": [tensor(shape=[2**40, 2**40])]},
    "strides overflow": {"tensors": [tensor(shape=[0, 2**40, 2**40])]},
    "offset beyond": {"tensors": [tensor(offset=704)]},
    "offset far beyond": {"tensors": [tensor(shape=[0], offset=2**52)]},
    "offset negative": {"tensors": [tensor(offset=-64)]},
    "not aligned": {"tensors": [tensor(offset=1)]},
    "ends beyond": {"tensors": [tensor(shape=[705])]},
    "overlap": {"tensors": [tensor(shape=[640]), tensor(name="b", offset=576)]},
    "tied to nothing": {"tensors": [tensor(alias="b")]},
    "tied to itself": {"tensors": [tensor(alias="a")]},
    "tied to a later one": {"tensors": [tensor(alias="b"), tensor(name="b")]},
    "tied with another shape": {"tensors": [tensor(), tensor(name="b", alias="a", shape=[65])]},
    "tied elsewhere": {"tensors": [tensor(), tensor(name="b", alias="a", offset=64)]},
}


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_manifests_are_refused(changes):
    fields = msgpack.unpackb(encode_manifest(MANIFEST)) | changes
    with pytest.raises(DecodeError):
        decode_manifest(msgpack.packb(fields))


@pytest.mark.parametrize(
    "stored", [b"", b"\xc1", b"\x80", b"\x93\x01\x02\x03", b"\xdd\xff\xff\xff\xff", b"\x81" * 5000]
)
def test_what_is_no_map_is_refused(stored):
    with pytest.raises(DecodeError):
        decode_manifest(stored)


def test_damage_never_raises_anything_else():
    stored = encode_manifest(MANIFEST)
    dice = random.Random(0)
    for _ in range(3000):
        damaged = bytearray(stored[: dice.randint(1, len(stored))])
        for _ in range(dice.randint(0, 4)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        try:
            decode_manifest(bytes(damaged))
        except DecodeError:
            continue
