"""Untrusted bytes: a valid group or DecodeError, in bounded memory and time."""

from __future__ import annotations

import copy
import pickle
import re
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import msgpack
import pytest
import torch
from hypothesis import given, settings

from redrb.codec import (
    GroupLayout,
    decode_batch,
    decode_items,
    encode_groups,
    parse_group,
    parse_groups,
)
from redrb.codec.layout import FIELD_CODES
from redrb.codec.wire import PREFIX, batch_limit
from redrb.errors import DecodeError, EncodeError, RecordError
from redrb.experience.records import BufferItem, Side, named_tensors
from tests.unit.codec_kernels import kernel  # noqa: F401 (used by every test)
from tests.unit.test_codec import assert_batches, join
from tests.unit.test_codec_golden import CASES, golden

quick = settings(deadline=None, derandomize=True, max_examples=200)
INT64, UINT16, FLOAT32, BOOL, UINT8 = 4, 6, 10, 0, 5


def blob_of(
    schema: Any,
    header: Any,
    body: bytes = b"",
    extras: bytes = b"",
    *,
    magic: bytes = b"RDRB",
    version: int = 1,
    flags: int = 0,
) -> bytes:
    packed = [own if isinstance(own, bytes) else msgpack.packb(own) for own in (schema, header)]
    lengths = (len(packed[0]), len(packed[1]), len(extras))
    return PREFIX.pack(magic, version, flags, *lengths) + b"".join([*packed, extras, body])


def decode_all(layout: GroupLayout) -> None:
    """Decode in every way: whatever was parsed can be decoded."""
    items = decode_items(layout)
    assert sum(t.nbytes for item in items for t in named_tensors(item).values()) == (
        layout.decoded_bytes
    )
    for side in ("left", "right"):
        try:
            assert len(decode_batch([layout], side=side).extras) == layout.samples
        except RecordError:
            continue


def attempt(blob: bytes) -> None:
    alone = parse_or_error(blob)
    for twin in parse_groups([blob, memoryview(blob)]):
        assert repr_of(twin) == repr_of(alone)
    if isinstance(alone, GroupLayout):
        decode_all(alone)


def parse_or_error(blob: bytes | memoryview) -> GroupLayout | DecodeError:
    try:
        return parse_group(blob)
    except DecodeError as error:
        return error


FACTS = (
    "samples", "nbytes", "policy_versions", "statuses", "group_id", "tags", "extras",
    "decoded_bytes",
)  # fmt: skip


def assert_parsed_alike(blobs: Sequence[bytes | memoryview]) -> None:
    """Check that blobs parsed together give the results and batches of blobs parsed alone."""
    alone = list(map(parse_or_error, blobs))
    together = parse_groups(blobs)
    assert list(map(repr_of, together)) == list(map(repr_of, alone))
    wanted = [own for own in alone if isinstance(own, GroupLayout)]
    for own in wanted:
        decode_all(own)
    found = [own for own in together if isinstance(own, GroupLayout)]
    side: Side
    for side in ("left", "right"):
        try:
            batch = decode_batch(wanted, side=side)
        except RecordError as error:
            with pytest.raises(RecordError, match=re.escape(str(error))):
                decode_batch(found, side=side)
        else:
            assert_batches(decode_batch(found, side=side), batch)
            assert_batches(
                decode_batch(found[::-1], side=side), decode_batch(wanted[::-1], side=side)
            )


def repr_of(own: GroupLayout | DecodeError) -> str:
    """Return all facts of a layout for comparison; nan equals nan, and 1 is no True."""
    if isinstance(own, DecodeError):
        return repr(own)
    fields = [(field.name, field.dtype.code, field.wire) for field in own.fields]
    return repr([fields, *(getattr(own, name) for name in FACTS)])


@pytest.mark.parametrize("name", CASES)
def test_every_truncation_is_refused(name):
    blob = golden(name)
    for length in range(len(blob)):
        with pytest.raises(DecodeError):
            parse_group(blob[:length])
    for more in (b"\x00", b"\xc0" * 100):
        with pytest.raises(DecodeError):
            parse_group(blob + more)


@pytest.mark.parametrize("name", CASES)
def test_every_single_changed_byte_is_refused_or_decodes(name):
    blob = golden(name)
    for at in range(len(blob)):
        changed = [
            blob[:at] + bytes([byte]) + blob[at + 1 :]
            for byte in {0, 0x90, 0xC4, 0xFF, blob[at] ^ 1} - {blob[at]}
        ]
        assert_parsed_alike([blob, *changed, memoryview(blob)])


@given(st.binary(max_size=300))
@quick
def test_random_bytes_are_refused(noise):
    attempt(noise)
    attempt(b"RDRB\x01\x00" + noise)
    attempt(blob_of(b"\x91\x93\x00\x04\x04", noise))
    attempt(blob_of(noise, b"\x93\x01\x90\x90"))
    attempt(blob_of([], [1, [], []], extras=noise))


@given(st.sampled_from(list(CASES)), st.lists(st.tuples(st.integers(0), st.integers(0, 255))))
@quick
def test_flipped_bytes_are_refused_or_decode(name, flips):
    blob = bytearray(golden(name))
    for at, byte in flips:
        blob[at % len(blob)] ^= byte
    attempt(bytes(blob))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 20)
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=8,
)


@given(JSON, JSON, JSON, st.lists(JSON, max_size=5))
@quick
def test_any_header_is_refused_or_decodes(ref, shapes, entry, tail):
    schema = [[3, FLOAT32, FLOAT32], ["x", INT64, UINT8], ["m", BOOL, BOOL]]
    for header in (
        [1, [[0, ref], [0, 2, shapes], 1], [[2], [1]], *tail],
        [1, [ref, entry, 0], [[1]], *tail],
        [1, [0, 0, 0], [shapes], *tail],
        [2, [0, [ref, entry], [[0, 0], ref, entry]], [[1], [0]], *tail],
        [1, entry, [[1]]],
        [ref, [0, 0, 0], shapes],
        entry,
    ):
        for size in (0, 4, 6, 11):
            attempt(blob_of(schema, header, bytes(size)))


@given(JSON)
@quick
def test_any_schema_is_refused_or_decodes(entry):
    for schema in (entry, [entry], [[entry, 4, 4]], [[0, entry, 4]], [[0, 4, entry]]):
        attempt(blob_of(schema, [1, [0], [[1]]], bytes(8)))


ONE = [["x", INT64, UINT8]]
HOSTILE: dict[str, bytes] = {
    "not the magic": blob_of([], [1, [], []], magic=b"RDRC"),
    "another version": blob_of([], [1, [], []], version=2),
    "an unknown flag": blob_of([], [1, [], []], flags=1),
    "no samples": blob_of([], [0, [], []]),
    "a negative number of samples": blob_of([], [-1, [], []]),
    "too many samples": blob_of([], [4097, [], []]),
    "a bool as the number of samples": blob_of([], [True, [], []]),
    "a float as the number of samples": blob_of([], [1.0, [], []]),
    "a short header": blob_of([], [1, []]),
    "a header that is a map": blob_of([], {"samples": 1}),
    "two headers": blob_of([], msgpack.packb([1, [], []]) * 2),
    "an empty header": blob_of([], b""),
    "more columns than the schema": blob_of([], [1, [0], [[1]]], b"\x00"),
    "a column twice": blob_of(ONE * 2, [1, [0, 0], [[1]]], b"\x00\x00"),
    "a standard field twice": blob_of([[0, 4, 4]] * 2, [1, [0, 0], [[0]]]),
    "a standard field by name": blob_of([["kl", 10, 10]], [1, [0], [[0]]]),
    "an unknown standard field": blob_of([[len(FIELD_CODES), 4, 4]], [1, [0], [[0]]]),
    "a negative standard field": blob_of([[-1, 4, 4]], [1, [0], [[0]]]),
    "a name that is a bool": blob_of([[True, 4, 4]], [1, [0], [[0]]]),
    "a name of bytes": blob_of([[b"x", 4, 4]], [1, [0], [[0]]]),
    "a long name": blob_of([["x" * 257, 4, 4]], [1, [0], [[0]]]),
    "a broken name": blob_of(b"\x91\x93\xa1\xff\x04\x04", [1, [0], [[0]]]),
    "many columns": blob_of([[str(n), 4, 4] for n in range(129)], [1, [0] * 129, [[0]]]),
    "an unknown dtype": blob_of([["x", 15, 15]], [1, [0], [[0]]]),
    "a negative dtype": blob_of([["x", -1, -1]], [1, [0], [[0]]]),
    "a dtype by name": blob_of([["x", "int64", "int64"]], [1, [0], [[0]]]),
    "an integer stored as float": blob_of([["x", INT64, FLOAT32]], [1, [0], [[1]]], bytes(4)),
    "a float stored as integer": blob_of([["x", FLOAT32, INT64]], [1, [0], [[1]]], bytes(8)),
    "a narrow stored as a wide one": blob_of([["x", UINT8, INT64]], [1, [0], [[1]]], bytes(8)),
    "a signed stored as unsigned": blob_of([["x", 1, UINT8]], [1, [0], [[1]]], bytes(1)),
    "an unsigned stored as signed": blob_of([["x", UINT16, 1]], [1, [0], [[1]]], bytes(1)),
    "a bool stored as bytes": blob_of([["x", BOOL, UINT8]], [1, [0], [[1]]], bytes(1)),
    "a column of four": blob_of([["x", 4, 4, 4]], [1, [0], [[0]]]),
    "a huge dimension": blob_of(ONE, [1, [0], [[2**40]]]),
    "a product that overflows": blob_of(ONE, [1, [0], [[2**31, 2**31, 4]]]),
    "huge dimensions beside a zero": blob_of(ONE, [1, [0], [[0, 2**31, 2**31]]]),
    "a negative dimension": blob_of(ONE, [1, [0], [[-1]]]),
    "two negative dimensions": blob_of(ONE, [1, [0], [[-1, -1]]], b"\x00"),
    "a dimension that is a bool": blob_of(ONE, [1, [0], [[True]]], b"\x00"),
    "a dimension that is a float": blob_of(ONE, [1, [0], [[1.0]]], b"\x00"),
    "nine dimensions": blob_of(ONE, [1, [0], [[1] * 9]], b"\x00"),
    "a shape that is a number": blob_of(ONE, [1, [0], [1]], b"\x00"),
    "a shape that is not there": blob_of(ONE, [1, [1], [[1]]], b"\x00"),
    "a negative shape": blob_of(ONE, [1, [-1], [[1]]], b"\x00"),
    "a shape that is a bool": blob_of(ONE, [1, [[False]], [[1]]], b"\x00"),
    "a missing column": blob_of(ONE, [1, [None], [[1]]]),
    "two shapes for one sample": blob_of(ONE, [1, [[[0, 0]]], [[1]]], b"\x00"),
    "one shape for two samples": blob_of(ONE, [2, [[[0]]], [[1]]], b"\x00"),
    "no entry": blob_of(ONE, [1, [[]], [[1]]], b"\x00"),
    "a long entry": blob_of(ONE, [1, [[0, 0, 0, 0, 0, 0]], [[1]]], b"\x00"),
    "a negative run": blob_of(ONE, [1, [[0, -1, 0]], [[1]]], bytes(2)),
    "runs that cancel out": blob_of(ONE, [1, [[0, -1, 0, 1, 0]], [[1]]], bytes(1)),
    "a long run": blob_of(ONE, [1, [[0, 2, 0]], [[1]]]),
    "runs that are long together": blob_of(ONE, [1, [[0, 1, 0, 1, 0]], [[1]]]),
    "a run of nan": blob_of(ONE, [1, [[0, float("nan"), 0]], [[1]]]),
    "a run of text": blob_of(ONE, [1, [[0, "1", 0]], [[1]]]),
    "a run that is a bool": blob_of(ONE, [1, [[0, True, 0]], [[1]]]),
    "a run's value beyond the dtype": blob_of(ONE, [1, [[0, 1, 2**63]], [[1]]]),
    "a bool of 2": blob_of([["x", BOOL, BOOL]], [1, [[0, 1, 2]], [[1]]]),
    "a float's run by its value": blob_of([["x", FLOAT32, FLOAT32]], [1, [[0, 1, 0.5]], [[1]]]),
    "a float's run below 0": blob_of([["x", FLOAT32, FLOAT32]], [1, [[0, 1, -1]], [[1]]]),
    "too short a body": blob_of(ONE, [1, [0], [[2]]], bytes(1)),
    "too long a body": blob_of(ONE, [1, [0], [[2]]], bytes(3)),
    "a bomb": blob_of(ONE, [1, [[0, 2**26, 0]], [[2**26]]]),
    "a bomb of many samples": blob_of(ONE, [4096, [[0, 2**14, 0]], [[2**14]]]),
    "a policy version of text": blob_of([], [1, [], [], "7"]),
    "a policy version that is a bool": blob_of([], [1, [], [], True]),
    "a policy version of 65 bits": blob_of([], [1, [], [], 2**63]),
    "two policy versions for one": blob_of([], [1, [], [], [1, 2]]),
    "an unknown status": blob_of([], [1, [], [], None, 7]),
    "a negative status": blob_of([], [1, [], [], None, -1]),
    "a status by name": blob_of([], [1, [], [], None, "failed"]),
    "a group id of bytes": blob_of([], [1, [], [], None, 1, b"g"]),
    "a list of group ids": blob_of([], [1, [], [], None, 1, ["g"]]),
    "a long group id": blob_of([], [1, [], [], None, 1, "g" * 1025]),
    "a list as a tag": blob_of([], [1, [], [], None, 1, None, {"a": [1]}]),
    "none as a tag": blob_of([], [1, [], [], None, 1, None, {"a": None}]),
    "a tag with a key of bytes": blob_of([], [1, [], [], None, 1, None, {b"a": 1}]),
    "a tag with a number as a key": blob_of([], [1, [], [], None, 1, None, {1: 1}]),
    "a tag twice": blob_of([], b"\x97\x01\x90\x90\xc0\x01\xc0\x82\xa1a\x01\xa1a\x02"),
    "a list as a key": blob_of([], b"\x97\x01\x90\x90\xc0\x01\xc0\x81\x90\x02"),
    "too many tags": blob_of([], [1, [], [], None, 1, None, {str(n): n for n in range(257)}]),
    "tags that are text": blob_of([], [1, [], [], None, 1, None, "tags"]),
    "extras of two samples for one": blob_of([], [1, [], []], extras=b"\x92\x80\x80"),
    "extras that are a map": blob_of([], [1, [], []], extras=b"\x80"),
    "extras with a key twice": blob_of([], [1, [], []], extras=b"\x91\x82\xa1a\x01\xa1a\x02"),
    "extras with a key of bytes": blob_of([], [1, [], []], extras=b"\x91\x81\xc4\x01a\x01"),
    "extras with broken text": blob_of([], [1, [], []], extras=b"\x91\x81\xa1\xff\x01"),
    "extras with a reserved byte": blob_of([], [1, [], []], extras=b"\x91\x81\xa1a\xc1"),
    "extras with a broken time": blob_of([], [1, [], []], extras=b"\x91\x81\xa1a\xd4\xff\x00"),
    "extras with a far time": blob_of(
        [], [1, [], []], extras=b"\x91\x81\xa1a\xc7\x0c\xff" + b"\x00" * 4 + b"\x7f" * 8
    ),
    "lengths beyond the blob": PREFIX.pack(b"RDRB", 1, 0, 0, 2**32 - 1, 2**32 - 1),
    "a header of half a gigabyte": PREFIX.pack(b"RDRB", 1, 0, 0, 2**29, 0) + bytes(100),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_contradictions_are_refused(what):
    with pytest.raises(DecodeError):
        parse_group(HOSTILE[what])


def test_the_hand_made_blobs_would_do_without_their_faults():
    layout = parse_group(blob_of(ONE, [2, [[0, 1, 7]], [[2]], 3, 4, "g", {"a": 1}], b"\x05\x06"))
    assert [item.tensors["x"].tolist() for item in decode_items(layout)] == [[7, 5], [7, 6]]
    decode_all(layout)
    decode_all(parse_group(blob_of([], [1, [], []], extras=b"\x91\x81\xa1a\x01")))


@given(
    st.lists(
        st.tuples(st.sampled_from(list(CASES)), st.integers(0), st.sampled_from([0, 0, 0, 1, 255])),
        min_size=1,
        max_size=6,
    )
)
@quick
def test_any_mix_is_parsed_alike(mix):
    blobs = []
    for name, at, change in mix:
        blob = bytearray(golden(name))
        blob[at % len(blob)] ^= change
        blobs.append(bytes(blob))
    assert_parsed_alike(blobs)


def test_contradictions_among_good_blobs_are_found_alike():
    good = blob_of(ONE, [1, [0], [[2]]], b"\x05\x06")
    ragged = blob_of(ONE, [1, [[0, 16, 7]], [[18]], 5], b"\x05\x06")
    for bad in HOSTILE.values():
        assert_parsed_alike([good, bad, ragged, bad])
    assert_parsed_alike([*HOSTILE.values(), good])
    for twin in (True, 1.0):  # equal to 1, and no int
        for header in (
            [twin, [0], [[1]]],
            [1, [0], [[twin]]],
            [1, [[0, twin, 7]], [[1]]],
            [1, [[0, 1, twin]], [[1]]],
            [1, [0, 1], [[1], [twin]]],
            [1, [0], [[1]], twin],
        ):
            plain = blob_of(ONE, [1, [0], [[1]]], b"\x01")
            assert_parsed_alike([plain, blob_of(ONE, header, b"\x01"), plain])
            assert_parsed_alike([plain, blob_of(ONE, header), plain])


NUMBERS = st.integers(-1, 20) | st.sampled_from([True, None, 2**31, 2**62, 2**63, -(2**63)])
ENTRIES = st.integers(0, 1) | st.lists(NUMBERS, min_size=1, max_size=5)


@given(st.lists(st.tuples(ENTRIES, ENTRIES, st.integers(0, 20)), min_size=2, max_size=4))
@quick
def test_any_runs_among_many_are_parsed_alike(rows):
    schema = [["x", INT64, UINT8], ["f", FLOAT32, FLOAT32]]
    blobs = [
        blob_of(schema, [1, [first, second], [[size], []]], bytes(body))
        for first, second, size in rows
        for body in (size, size + 4, 4 * size + size, 8)
    ]
    assert_parsed_alike(blobs)
    fit = [blob for blob in blobs if isinstance(parse_groups([blob])[0], GroupLayout)]
    assert_parsed_alike(fit)


def test_later_versions_may_add_to_the_header():
    layout = parse_group(blob_of([], [1, [], [], None, 1, None, None, "more", [1]]))
    assert layout.tags == [{}]


@pytest.mark.parametrize(
    "other",
    [
        bytearray(golden("plain")),
        memoryview(golden("plain") * 2)[::2],
        memoryview(golden("plain") * 8).cast("q"),
        memoryview(golden("plain")).cast("b"),
        "",
        None,
    ],
)
def test_only_bytes_are_parsed(other):
    with pytest.raises(DecodeError):
        parse_group(other)
    good = golden("plain")
    first, bad, last = parse_groups([good, other, memoryview(good)])
    assert isinstance(bad, DecodeError)
    assert not isinstance(first, DecodeError)
    assert not isinstance(last, DecodeError)


@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 200_000,
        b"\x91" * 600 + b"\xc0",
        b"\x81\xa1a" * 60_000,
        b"\xdd\x00\x0f\xff\xff" * 100_000,
        b"\xdf\x00\x0f\xff\xff\xa1a" * 20_000,
        b"\xc6\x7f\xff\xff\xff" + bytes(9_000),
        b"\xdd\xff\xff\xff\xff" + b"\xc0" * 900_000,
        b"\x91\x81\xa1a" * 3_000 + b"\xc0",
    ],
    ids=["lists", "few lists", "maps", "long lists", "long maps", "bytes", "nulls", "mixed"],
)
def test_nested_and_long_lists_are_refused_cheaply(data):
    tracemalloc.start()
    started = time.monotonic()
    for blob in (
        blob_of(data[:65_535], [1, [], []]),
        blob_of([], data),
        blob_of([], [1, [], []], extras=data),
    ):
        with pytest.raises(DecodeError):
            parse_group(blob)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("tail", ["versions", "statuses", "group_id", "extras"])
@pytest.mark.parametrize("levels", [65, 500, 1_000])
def test_deep_lists_are_refused_before_anything_recurses_into_them(tail, levels):
    deep = b"\x91" * levels + b"\xc0"
    if tail == "extras":
        blob = blob_of([], [1, [], []], extras=b"\x91\x81\xa1a" + deep)
    else:
        before = b"\xc0" * (tail != "versions") + b"\x01" * (tail == "group_id")
        count = 4 + len(before)
        blob = blob_of([], bytes([0x90 + count]) + b"\x01\x90\x90" + before + deep)
    with pytest.raises(DecodeError):
        parse_group(blob)


def test_extras_of_the_deepest_nesting_can_be_copied_and_pickled():
    deep = b"\x91" * 62 + b"\xc0"
    layout = parse_group(blob_of([], [1, [], []], extras=b"\x91\x81\xa1a" + deep))
    assert copy.deepcopy(layout.extras) == pickle.loads(pickle.dumps(layout.extras))
    with pytest.raises(DecodeError, match="64 levels"):
        parse_group(blob_of([], [1, [], []], extras=b"\x91\x81\xa1a\x91" + deep))


@pytest.mark.parametrize("entry", [b"\x90", b"\x81\xa1a\xc0"])
def test_many_small_lists_and_maps_are_refused_in_bounded_memory(entry):
    count = (2 << 20) // len(entry)
    extras = b"\x91\x81\xa1a\xdd" + count.to_bytes(4, "big") + entry * count
    blob = blob_of([], [1, [], []], extras=extras)
    tracemalloc.start()
    with pytest.raises(DecodeError, match="262144 lists and maps"):
        parse_group(blob)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20


def test_the_largest_header_stays_small_in_memory():
    schema = [[str(n), UINT8, UINT8] for n in range(128)]
    tags = {f"{n:03}": n for n in range(256)}
    entries = [0] * 16 + [[None]] * 112
    blob = blob_of(schema, [4096, entries, [[0]], None, 1, None, tags])
    tracemalloc.start()
    layout = parse_group(blob)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert layout.decoded_bytes == 0
    assert peak < 256 << 20


def test_groups_that_are_large_together_are_refused_before_memory_is_taken():
    blob = blob_of(ONE, [1, [[0, 2**25, 1]], [[2**25]]])
    layouts = [parse_group(blob)] * 17
    with pytest.raises(RecordError, match="fewer groups"):
        decode_batch(layouts)
    wide = blob_of(ONE, [2, [[[0, 1], [2**25, 0], [1, 0]]], [[2**25], [0]]])
    with pytest.raises(RecordError, match="fewer groups"):
        decode_batch([parse_group(wide)] * 9)
    assert torch.equal(decode_items(layouts[0])[0].tensors["x"][-3:], torch.ones(3).long())


def test_small_blobs_become_little_memory():
    """A mask counts although its tensor is empty, and so does each tensor without elements."""
    sequences = [[0, 4, 4]]
    masked = blob_of(sequences, [2, [[[0, 1]]], [[260_000_000, 0], [1, 0]]])
    assert len(masked) < 48
    run = blob_of(ONE, [60, [[[0] + [1] * 59, [2**22] + [0] * 59, 1]], [[2**22], [0]]])
    for blob in (masked, run):
        with pytest.raises(RecordError, match="limit for these groups"):
            decode_batch([parse_group(blob)])
    columns = [[f"x{number}", 4, 4] for number in range(128)]
    with pytest.raises(DecodeError, match="tensors"):
        parse_group(blob_of(columns, [4096, [0] * 128, [[0]]]))
    assert parse_group(blob_of(columns[:16], [4096, [0] * 16, [[0]]])).samples == 4096
    empty = {f"x{number}": torch.zeros(0) for number in range(17)}
    with pytest.raises(EncodeError, match="tensors"):
        encode_groups([[BufferItem(None, None, tensors=dict(empty)) for _ in range(4096)]])


def test_a_ragged_batch_of_real_size_is_padded():
    """One long sample beside 511 short ones, an eighth of a real length."""
    lengths = [16_384] + [1] * 511
    items = [BufferItem(torch.arange(2, length + 2), None) for length in lengths]
    layouts = [parse_group(join(group)) for group in encode_groups([[item] for item in items])]
    limit = batch_limit(sum(layout.nbytes for layout in layouts))
    padded = 512 * 16_384 * 16
    assert padded < limit
    assert 8 * padded < batch_limit(2 * 131_072)
    assert decode_batch(layouts).sequences.shape == (512, 16_384)


def test_a_signalling_nan_is_widened_alike_by_both_kernels():
    """Found by fuzzing: a cast from float to double sets a bit of it."""
    blob = blob_of([["x", 11, 9]], [1, [0], [[2]]], b"\x05\x7c\x05\xfc")
    (item,) = decode_items(parse_group(blob))
    bits = [int(own) for own in item.tensors["x"].view(torch.int64)]
    assert bits == [0x7FF0140000000000, 0xFFF0140000000000 - 2**64]
