"""Manifests: read back as they were written, and refused if they are hostile."""

import math
import random
import struct
import time
import tracemalloc

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redrb.errors import DecodeError
from redrb.weights.wire.layout import Layout, TensorEntry
from redrb.weights.wire.lora_config import LoraConfig
from redrb.weights.wire.manifest import (
    ChunkSource,
    Delta,
    Manifest,
    decode_manifest,
    pack_hashes,
)


def entry(name, dtype, shape, offset, alias=None):
    return TensorEntry(name, dtype, shape, offset, alias)


LAYOUT = Layout(
    (
        entry("embed", "bfloat16", (10, 30), 0),
        entry("scale", "float32", (), 640),
        entry("none", "int64", (0, 7), 704),
        entry("head", "bfloat16", (10, 30), 0, alias="embed"),
        entry("odd", "uint8", (4, 25), 704),
    ),
    832,
    256,
)
CHECKSUMS = pack_hashes((1, 2**64 - 1, 0, 77))
DELTA = Delta(6, 12345, struct.pack(">4I", 0, 300, 7, 0), 10, pack_hashes((5, 6)))
FULL = Manifest(
    version=7,
    kind="full",
    names=5,
    nbytes=832,
    chunk_bytes=256,
    layout_id=LAYOUT.id,
    tensors=LAYOUT.tensors,
    checksums=CHECKSUMS,
    sources=(ChunkSource(2, 0, 1), ChunkSource(3, 1, 3)),
    spread=0,
)
ANCHOR = msgspec.structs.replace(FULL, delta=DELTA, spread=16)
CHANGE = msgspec.structs.replace(FULL, kind="delta", tensors=None, sources=(), delta=DELTA)
LORA = msgspec.structs.replace(FULL, kind="lora", base=6, adapter={"layer": LoraConfig(2, 4.0)})
ALL = {"full": FULL, "anchor": ANCHOR, "delta": CHANGE, "lora": LORA}


@pytest.mark.parametrize("manifest", ALL.values(), ids=ALL.keys())
def test_a_manifest_is_read_back(manifest):
    assert decode_manifest(msgspec.msgpack.encode(manifest)) == manifest


@pytest.mark.parametrize("manifest", ALL.values(), ids=ALL.keys())
def test_unknown_keys_are_ignored(manifest):
    fields = msgpack.unpackb(msgspec.msgpack.encode(manifest))
    assert decode_manifest(msgpack.packb(fields | {"later": {"more": [1]}})) == manifest


@pytest.mark.parametrize(
    ("manifest", "base", "stored", "delta_bytes"),
    [
        (FULL, 0, 832, None),
        (ANCHOR, 0, 832 + 307, 307),
        (CHANGE, 6, 307, 307),
        (LORA, 6, 832, None),
    ],
    ids=ALL.keys(),
)
def test_a_manifest_describes_its_version(manifest, base, stored, delta_bytes):
    described = manifest.describe("actor", 12.5)
    assert (described.kind, described.version, described.tensors) == (manifest.kind, 7, 5)
    assert (described.base, described.nbytes) == (base, 832)
    assert (described.stored_bytes, described.delta_bytes) == (stored, delta_bytes)


def test_a_state_has_a_hash_and_so_has_a_list_of_tensors():
    assert FULL.state_hash == CHANGE.state_hash
    assert FULL.state_hash != msgspec.structs.replace(FULL, checksums=bytes(32)).state_hash
    assert Layout((entry("b", "uint8", (64,), 0),), 832, 256).id != LAYOUT.id


def test_spans_cover_each_stored_byte_once():
    covered = [
        (index * 256 + span.in_chunk, span.nbytes)
        for index, spans in enumerate(LAYOUT.spans())
        for span in spans
    ]
    assert covered == [(0, 256), (256, 256), (512, 88), (640, 4), (704, 64), (768, 36)]


def tensor(**changes):
    return {"name": "a", "dtype": "uint8", "shape": [64], "offset": 0} | changes


def hostile(manifest, changes):
    """Return the bytes of a manifest with other fields; its hash fits what it lists."""
    fields = msgpack.unpackb(msgspec.msgpack.encode(manifest)) | changes
    if "tensors" in changes and "layout" not in changes:
        import xxhash

        fields["layout"] = xxhash.xxh3_64_intdigest(msgpack.packb(fields["tensors"]))
    return msgpack.packb(fields)


HOSTILE = {
    "later format": {"format": 4},
    "earlier format": {"format": 1},
    "later kind": {"kind": "quantized"},
    "kind as list": {"kind": ["full"]},
    "version zero": {"version": 0},
    "version negative": {"version": -1},
    "version as bool": {"version": True},
    "version as float": {"version": 7.0},
    "version too large": {"version": 2**53},
    "names negative": {"names": -1},
    "names as text": {"names": "5"},
    "names too large": {"names": 2**30},
    "spread negative": {"spread": -1},
    "spread too large": {"spread": 2**20},
    "negative bytes": {"nbytes": -1},
    "more bytes than checksums": {"nbytes": 2**50},
    "bytes without tensors": {"nbytes": 1280, "checksums": bytes(40), "sources": [[2, 0, 5]]},
    "fewer bytes than tensors": {"nbytes": 769},
    "no chunk size": {"chunk_bytes": 0},
    "odd chunks": {"chunk_bytes": 255},
    "tiny chunks": {"nbytes": 2**40, "chunk_bytes": 64},
    "huge chunks": {"chunk_bytes": 2**30},
    "other chunks": {"chunk_bytes": 512},
    "checksums cut": {"checksums": b"\0" * 31},
    "checksums too long": {"checksums": b"\0" * 40},
    "checksums as list": {"checksums": [1, 2, 3, 4]},
    "another layout": {"layout": 1},
    "layout as text": {"layout": "1"},
    "layout too large": {"layout": -1},
    "no tensors": {"tensors": None},
    "tensors as map": {"tensors": {}},
    "tensor as list": {"tensors": [["a", "uint8", [64], 0]]},
    "unknown dtype": {"tensors": [tensor(dtype="object")]},
    "dtype as list": {"tensors": [tensor(dtype=["uint8"])]},
    "no name": {"tensors": [tensor(name="")]},
    "name as bytes": {"tensors": [tensor(name=b"a")]},
    "long name": {"tensors": [tensor(name="a" * 1025)]},
    "same name twice": {"tensors": [tensor(), tensor(offset=64)]},
    "no shape": {"tensors": [tensor(shape=None)]},
    "negative size": {"tensors": [tensor(shape=[-64])]},
    "size as float": {"tensors": [tensor(shape=[64.0])]},
    "size as bool": {"tensors": [tensor(shape=[True])]},
    "too many dimensions": {"tensors": [tensor(shape=[1] * 65)]},
    "product overflows": {"tensors": [tensor(shape=[2**40, 2**40])]},
    "strides overflow": {"tensors": [tensor(shape=[0, 2**40, 2**40])]},
    "no offset": {"tensors": [tensor(offset=None)]},
    "offset beyond": {"tensors": [tensor(offset=832)]},
    "offset far beyond": {"tensors": [tensor(shape=[0], offset=2**52)]},
    "offset negative": {"tensors": [tensor(offset=-64)]},
    "not aligned": {"tensors": [tensor(shape=[800], offset=1)]},
    "ends beyond": {"tensors": [tensor(shape=[833])]},
    "overlap": {"tensors": [tensor(shape=[640]), tensor(name="b", shape=[200], offset=576)]},
    "tied to nothing": {"tensors": [tensor(shape=[832], alias="b")]},
    "tied to itself": {"tensors": [tensor(shape=[832], alias="a")]},
    "tied to a number": {"tensors": [tensor(shape=[832], alias=1)]},
    "tied to a later one": {"tensors": [tensor(alias="b"), tensor(name="b", shape=[832])]},
    "tied to a tied one": {
        "tensors": [
            tensor(shape=[832]),
            tensor(name="b", alias="a", shape=[832]),
            tensor(name="c", alias="b", shape=[832]),
        ]
    },
    "tied with another shape": {
        "tensors": [tensor(shape=[832]), tensor(name="b", alias="a", shape=[831])]
    },
    "tied with another dtype": {
        "tensors": [tensor(shape=[832]), tensor(name="b", alias="a", shape=[832], dtype="int8")]
    },
    "tied elsewhere": {"tensors": [tensor(shape=[64]), tensor(name="b", alias="a", offset=768)]},
    "no sources": {"sources": None},
    "sources as map": {"sources": {}},
    "source as number": {"sources": [1, 2]},
    "source too short": {"sources": [[2, 0]]},
    "sources cut": {"sources": [[2, 0, 3]]},
    "sources beyond": {"sources": [[2, 0, 5]]},
    "sources far beyond": {"sources": [[2, 0, 2**53]]},
    "sources out of order": {"sources": [[2, 2, 2], [3, 0, 2]]},
    "sources overlap": {"sources": [[2, 0, 3], [3, 2, 2]]},
    "sources leave a gap": {"sources": [[2, 0, 1], [3, 2, 2]]},
    "source of no token": {"sources": [[0, 0, 4]]},
    "source of negative count": {"sources": [[2, 0, 5], [3, 5, -1]]},
    "token as text": {"sources": [["2", 0, 4]]},
}


def change(**changes):
    fields = msgpack.unpackb(msgspec.msgpack.encode(CHANGE))
    return {"delta": fields["delta"] | changes}


HOSTILE_DELTAS = {
    "no delta": {"delta": None},
    "delta as list": {"delta": [1]},
    "of itself": change(base=7),
    "of a later one": change(base=8),
    "of none": change(base=0),
    "base as text": change(base="6"),
    "before negative": change(before=-1),
    "before as bytes": change(before=b"1"),
    "sizes as list": change(sizes=[0, 300, 7, 0]),
    "sizes cut": change(sizes=bytes(15)),
    "more sizes": change(sizes=bytes(20)),
    "sizes beyond the state": change(sizes=struct.pack(">4I", 0, 826, 7, 0)),
    "sizes of gigabytes": change(sizes=struct.pack(">4I", *[2**32 - 1] * 4)),
    "no checksums": change(checksums=b""),
    "checksums cut": change(checksums=bytes(15)),
    "checksums of one piece": change(checksums=bytes(8)),
    "more checksums": change(checksums=bytes(24)),
    "checksums as list": change(checksums=[5, 6]),
    "no token": change(token=None),
    "token 0": change(token=0),
    "token as text": change(token="10"),
    "token beyond": change(token=2**53),
    "chunks beyond": {"nbytes": 2**53 - 1},
    "chunks in the sources": {"sources": [[1, 0, 4]]},
}


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("manifest", [FULL, LORA], ids=["full", "lora"])
def test_hostile_manifests_are_refused(manifest, changes):
    with pytest.raises(DecodeError):
        decode_manifest(hostile(manifest, changes))


@pytest.mark.parametrize("changes", HOSTILE_DELTAS.values(), ids=HOSTILE_DELTAS.keys())
def test_hostile_deltas_are_refused(changes):
    with pytest.raises(DecodeError):
        decode_manifest(hostile(CHANGE, changes))
    if changes.get("delta") is not None:  # a full version needs none
        with pytest.raises(DecodeError):
            decode_manifest(hostile(ANCHOR, changes))


@pytest.mark.parametrize("base", [7, 8, -1, True, "6", None])
def test_hostile_adapters_are_refused(base):
    with pytest.raises(DecodeError):
        decode_manifest(hostile(LORA, {"base": base}))


SETTINGS = [2, 8.0, 0.1, True, False]
NO_SETTINGS = [
    None,
    [],
    {1: SETTINGS},
    {"0": None},
    {"0": {"r": 2}},
    {"0": [2]},
    {"0": [*SETTINGS, 0]},
    {"0": [0, 8.0, 0.1, True, False]},
    {"0": [1 << 21, 8.0, 0.1, True, False]},
    {"0": [True, 8.0, 0.1, True, False]},
    {"0": [2.0, 8.0, 0.1, True, False]},
    {"0": [2, math.nan, 0.1, True, False]},
    {"0": [2, math.inf, 0.1, True, False]},
    {"0": [2, "8", 0.1, True, False]},
    {"0": [2, 8.0, -0.1, True, False]},
    {"0": [2, 8.0, 1.1, True, False]},
    {"0": [2, 8.0, math.nan, True, False]},
    {"0": [2, 8.0, 0.1, 1, False]},
    {"0": [2, 8.0, 0.1, True, None]},
    {str(index): SETTINGS for index in range((1 << 18) + 1)},
]


@pytest.mark.parametrize("settings", NO_SETTINGS, ids=lambda settings: repr(settings)[:40])
def test_damaged_settings_of_an_adapter_are_refused(settings):
    with pytest.raises(DecodeError):
        decode_manifest(hostile(LORA, {"lora": settings}))


def nested(depth):
    return msgpack.packb({"format": 3, "kind": "full", "nbytes": 0})[:-1] + b"\x91" * depth + b"\0"


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\x93\x01\x02\x03",
        b"\xdd\xff\xff\xff\xff",
        b"\x81" * 5000,
        b"\xdf\xff\xff\xff\xff" + b"\1" * 100,
        b"\xc6\xff\xff\xff\xff",
        *(nested(depth) for depth in (1, 300, 500, 900, 980, 1000, 1020, 5000)),
    ],
    ids=lambda stored: f"{len(stored)} bytes",
)
def test_other_values_than_manifests_are_refused(stored):
    with pytest.raises(DecodeError):
        decode_manifest(stored)


def decoded(stored):
    """Decode, and return the error, if any, and how long it took."""
    started = time.process_time()
    try:
        decode_manifest(stored)
    except DecodeError as error:
        return error, time.process_time() - started
    return None, time.process_time() - started


def test_a_million_chunks_are_read_quickly_and_more_are_refused():
    def of(chunks):
        return msgpack.packb(
            {
                "format": 3, "kind": "delta", "version": 2, "names": 1, "nbytes": 64 * chunks,
                "chunk_bytes": 64, "layout": 1, "checksums": bytes(8 * chunks), "sources": [],
                "spread": 0, "delta": {
                    "base": 1, "before": 1, "sizes": bytes(4 * chunks), "token": 1,
                    "checksums": b"",
                },
            }
        )  # fmt: skip

    error, took = decoded(of(1 << 20))
    assert (error, took < 3) == (None, True)
    error, took = decoded(of((1 << 20) + 1))
    assert "chunks; the limit is" in str(error)
    assert took < 1


def test_many_tensors_are_read_quickly():
    tensors = tuple(entry(f"layer.{i}", "uint8", (64,), 64 * i) for i in range(20_000))
    layout = Layout(tensors, 64 * len(tensors), 1 << 22)
    manifest = msgspec.structs.replace(
        FULL, names=len(tensors), nbytes=layout.nbytes, chunk_bytes=1 << 22, tensors=tensors,
        layout_id=layout.id, checksums=bytes(8), sources=(ChunkSource(1, 0, 1),),
    )  # fmt: skip
    error, took = decoded(msgspec.msgpack.encode(manifest))
    assert (error, took < 3) == (None, True)


@pytest.mark.parametrize("item", [b"\xc0", b"\x90", b"\x80", b"\xcb" + bytes(8)], ids=repr)
@pytest.mark.parametrize("field", ["version", "tensors", "kind", "later"])
def test_junk_takes_little_time_and_memory(item, field):
    """The smallest values in place of a field: an object of Python each."""
    count = (64 << 10) // len(item)
    fields = msgpack.unpackb(msgspec.msgpack.encode(FULL))
    fields.pop(field, None)
    head = bytes([0x80 + len(fields) + 1])
    stored = head + msgpack.packb(fields)[1:] + msgpack.packb(field)
    stored += b"\xdd" + struct.pack(">I", count) + item * count
    _, took = decoded(stored)
    assert took < 2
    tracemalloc.start()
    decoded(stored)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * len(stored)


def test_more_than_a_manifest_may_have_is_not_looked_at():
    error, took = decoded(bytes(65 << 20))
    assert error is not None
    assert took < 0.1


@pytest.mark.parametrize("manifest", ALL.values(), ids=ALL.keys())
def test_a_cut_manifest_is_refused(manifest):
    stored = msgspec.msgpack.encode(manifest)
    for length in range(len(stored)):
        with pytest.raises(DecodeError):
            decode_manifest(stored[:length])


@pytest.mark.parametrize("manifest", ALL.values(), ids=ALL.keys())
def test_damage_never_raises_anything_else(manifest):
    stored = msgspec.msgpack.encode(manifest)
    dice = random.Random(0)
    for _ in range(400):
        damaged = bytearray(stored)
        for _ in range(dice.randint(1, 4)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        try:
            decode_manifest(bytes(damaged))
        except DecodeError:
            continue


VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(),
        st.text(max_size=5),
        st.binary(max_size=40), st.sampled_from([0, 1, 4, 64, 256, 832, "full", "delta", "lora"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["name", "dtype", "shape", "offset", "alias", "base"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)  # fmt: skip
FIELDS = st.sampled_from(
    sorted(msgpack.unpackb(msgspec.msgpack.encode(ANCHOR)) | {"lora": 0, "base": 0})
)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.sampled_from(sorted(ALL)), st.dictionaries(FIELDS, VALUES, min_size=1, max_size=3))
def test_fields_of_any_kind_are_refused_or_read(kind, changes):
    try:
        found = decode_manifest(hostile(ALL[kind], changes))
    except DecodeError:
        return
    assert decode_manifest(msgspec.msgpack.encode(found)) == found


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(stored):
    with pytest.raises(DecodeError):
        decode_manifest(stored)
