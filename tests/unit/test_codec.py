"""Decoded samples equal the encoded ones, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from redrb.codec import (
    EncodedGroup,
    GroupLayout,
    check_and_encode_groups,
    decode_batch,
    decode_items,
    encode_groups,
    parse_group,
    parse_groups,
)
from redrb.codec.collecting import BY_TORCH
from redrb.codec.dtypes import DTYPES
from redrb.errors import EncodeError, RecordError
from redrb.experience import (
    BufferItem,
    Experience,
    Status,
    make_experience_batch,
    split_experience_batch,
)
from redrb.experience.batching import padded_rows
from redrb.experience.padding import with_masks
from redrb.experience.records import TENSOR_FIELDS, named_tensors
from tests.unit.codec_kernels import kernel  # noqa: F401 (used by every test)

METADATA = ("policy_version", "status", "group_id", "tags", "extras")
ALL_DTYPES = [dtype.tensor for dtype in DTYPES]
quick = settings(
    deadline=None,
    derandomize=True,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def make(**fields: Any) -> BufferItem:
    return BufferItem(**{**dict.fromkeys(TENSOR_FIELDS), **fields})


def rollout(tokens: int = 24, actions: int = 18, seed: int = 0, **fields: Any) -> BufferItem:
    generator = torch.Generator().manual_seed(seed)
    floats = [torch.randn(actions, generator=generator) for _ in range(4)]
    standard = {
        "sequences": torch.randint(1, 32_000, (tokens,), generator=generator),
        "action_log_probs": floats[0],
        "values": floats[1],
        "reward": torch.randn((), generator=generator),
        "kl": floats[2],
        "advantages": floats[3],
        "attention_mask": torch.ones(tokens, dtype=torch.int64),
        "action_mask": torch.ones(actions, dtype=torch.bool),
    }
    return make(**{**standard, **fields})


def join(group: EncodedGroup) -> bytes:
    blob = group.blob
    assert len(blob) == group.nbytes
    return blob


def trip(items: Sequence[BufferItem], **options: Any) -> list[BufferItem]:
    (group,) = encode_groups([items], **options)
    assert group.samples == len(items)
    return decode_items(parse_group(join(group)))


def bits(tensor: Tensor) -> Tensor:
    dtype = BY_TORCH[tensor.dtype]
    carriers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().cpu().contiguous().view(carriers[dtype.itemsize])


def assert_tensors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(bits(found[name]), bits(tensor)), name


def assert_same(found: Sequence[BufferItem], wanted: Sequence[BufferItem]) -> None:
    assert len(found) == len(wanted)
    for own, other in zip(found, wanted, strict=True):
        tensors = dict(sorted(other.tensors.items()))
        assert_tensors(named_tensors(own), {**named_tensors(make(**fields_of(other))), **tensors})
        for name in METADATA:
            assert getattr(own, name) == getattr(other, name), name
            assert type(getattr(own, name)) is type(getattr(other, name)), name


def fields_of(item: BufferItem) -> dict[str, Tensor | None]:
    return {name: getattr(item, name) for name in TENSOR_FIELDS}


def assert_batches(found: Experience, wanted: Experience) -> None:
    assert_tensors(named_tensors(found), named_tensors(wanted))
    assert found.padding_side == wanted.padding_side
    for name in METADATA:
        assert getattr(found, name) == getattr(wanted, name), name


def values_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Any bit patterns of this dtype, so that nan, -0.0 and infinities are among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, size), generator=generator).to(torch.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_and_shape_comes_back(dtype):
    for shape in [(), (0,), (1,), (15,), (16,), (17,), (3, 0, 2), (4, 5, 6)]:
        items = [make(tensors={"x": values_of(dtype, shape, seed)}) for seed in range(3)]
        assert_same(trip(items), items)
        assert_same([trip([item])[0] for item in items], items)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_runs_come_back_bit_for_bit(dtype):
    for seed in range(4):
        lead, middle, trail = (values_of(dtype, (n,), seed) for n in (1, 30, 2))
        for tensor in (
            torch.cat([lead.repeat(20), middle, trail[:1].repeat(33)]),
            torch.cat([middle, trail[1:].repeat(16)]),
            torch.cat([lead.repeat(16), middle]),
            lead.repeat(64),
            torch.cat([lead.repeat(31), trail[:1]]),
        ):
            items = [make(tensors={"x": tensor}), make(tensors={"x": middle})]
            assert_same(trip(items), items)


def test_signed_zero_and_nan_payloads_survive_in_runs():
    payload = torch.tensor([0x7FC01234, -0x3FEDCC, 0], dtype=torch.int32).view(torch.float32)
    for value in (-0.0, float("nan"), float("-inf"), *payload):
        full = torch.full((40,), float(value)) if isinstance(value, float) else value.repeat(40)
        mixed = torch.cat([full, torch.tensor([1.0, -0.0]), full])
        items = [make(values=full), make(values=mixed)]
        assert_same(trip(items), items)


@pytest.mark.parametrize("value", [0, 1, 7, 151_643, -100, 2**62, -(2**63)])
def test_a_mask_or_a_pad_costs_no_body(value):
    body = torch.randint(0, 200, (100,))
    padded = torch.cat([torch.full((900,), value), body])
    mask = (torch.arange(1000) >= 900).long()
    item = make(sequences=padded, attention_mask=mask, action_mask=torch.ones(512).bool())
    (group,) = encode_groups([[item]])
    assert group.nbytes < 100 + 80
    assert_same(trip([item]), [item])


@pytest.mark.parametrize(
    ("low", "high", "size"),
    [
        *[(0, 1, 1 / 8), (0, 255, 1), (-128, 127, 1), (-129, 0, 2), (0, 65_535, 2)],
        *[(-1, 32_768, 4), (0, 2**32 - 1, 4), (-1, 2**32 - 1, 8), (0, 2**63 - 1, 8)],
    ],
)
def test_integers_take_the_least_bytes_that_lose_nothing(low, high, size):
    tensor = torch.tensor([low, high] * 400)
    item = make(sequences=tensor)
    (group,) = encode_groups([[item]])
    assert group.nbytes == pytest.approx(800 * size, abs=40)
    assert_same(trip([item]), [item])


def test_metadata_comes_back():
    when = datetime(2024, 5, 1, 12, 30, 15, 123456, tzinfo=UTC)
    messages = [{"role": "user", "content": "π ≈ 3"}]
    extras = {"messages": messages, "none": None, "b": b"\x00", "t": when}
    items = [
        rollout(policy_version=3, status=Status.ABORTED, group_id="prompt ✓", extras=extras),
        rollout(policy_version=4, group_id="prompt ✓"),
        rollout(group_id="prompt ✓", tags={"ok": 1, "n": -(2**63), "f": float("inf"), "s": ""}),
    ]
    items[1].tags = {"ok": True, "n": 1, "f": 1.0, "s": "é"}
    found = trip(items)
    assert_same(found, items)
    assert [type(value) for value in found[1].tags.values()] == [bool, int, float, str]
    assert [type(value) for value in found[2].tags.values()] == [int, int, float, str]


def test_a_policy_version_stands_in_only_where_there_is_none():
    items = [rollout(), rollout(policy_version=3)]
    found = trip(items, policy_version=9)
    assert [item.policy_version for item in found] == [9, 3]
    assert [item.policy_version for item in items] == [None, 3]
    assert trip([rollout(policy_version=True)])[0].policy_version == 1


def test_a_blob_does_not_depend_on_its_neighbours():
    groups = [
        [rollout(seed=1)],
        [rollout(30, 7, seed=2), rollout(31, 6, seed=3, attention_mask=None, policy_version=2)],
        [make(sequences=torch.tensor([1, 0]), tensors={"z": torch.zeros(20), "a": torch.ones(1)})],
        [make(sequences=torch.tensor([-1, 300]))],
        [make(sequences=torch.zeros(50, dtype=torch.int64), reward=torch.tensor(1.0))],
        [make()],
        [rollout(seed=4, kl=torch.zeros(18), values=torch.tensor(0.5), group_id="g")] * 3,
    ]
    alone = [join(encode_groups([group])[0]) for group in groups]
    assert [join(group) for group in encode_groups(groups)] == alone
    assert [join(group) for group in encode_groups(groups[::-1])] == alone[::-1]
    for group, blob in zip(groups, alone, strict=True):
        assert_same(decode_items(parse_group(blob)), group)


def test_fields_may_be_missing_in_some_samples():
    items = [
        rollout(values=None, tensors={"only": torch.ones(3)}),
        rollout(kl=None, action_mask=torch.tensor([True] * 20)),
        make(),
    ]
    assert_same(trip(items), items)


def test_bools_that_are_not_0_or_1_in_memory_are_true():
    odd = torch.tensor([0, 2, 255, 1], dtype=torch.uint8).view(torch.bool).repeat(9)
    runs = torch.full((40,), 7, dtype=torch.uint8).view(torch.bool)
    (found,) = trip([make(tensors={"odd": odd, "runs": runs})])
    assert found.tensors["odd"].tolist() == [False, True, True, True] * 9
    assert bits(found.tensors["runs"]).tolist() == [1] * 40


def test_decoded_samples_own_their_memory():
    item = rollout(tags={"a": 1}, extras={"b": [1]})
    blob = join(encode_groups([[item, item]])[0])
    layout = parse_group(blob)
    first, second = decode_items(layout)
    for own in named_tensors(first).values():
        own.zero_()
    first.tags["a"] = 2
    assert_same([second], [item])
    assert_same(decode_items(layout), [item, item])


def encode_rows(batch: Experience, **options: Any) -> list[EncodedGroup]:
    return encode_groups([[row] for row in padded_rows(batch)], **options)


def test_a_batch_is_encoded_row_by_row_and_bit_for_bit():
    items = [rollout(20 + seed, 10 + seed, seed, policy_version=seed) for seed in range(5)]
    batch = make_experience_batch(items)
    batch.tensors["more"] = torch.randn(5, 2, 3)
    batch.extras = [{"text": str(row)} for row in range(5)]
    blobs = [join(group) for group in encode_rows(batch)]
    assert_batches(decode_batch([parse_group(blob) for blob in blobs]), batch)
    rows = split_experience_batch(Experience(**{**vars(batch), "padding_side": "right"}))
    whole = [join(group) for group in encode_groups([[row] for row in rows])]
    assert blobs[-1] == whole[-1]


def test_a_batch_takes_one_value_for_all_metadata():
    batch = make_experience_batch([rollout(), rollout()])
    batch.policy_version, batch.status, batch.tags = None, Status.FILTERED, {"level": 3}
    batch.group_id, batch.extras = None, {}
    groups = encode_rows(batch, policy_version=4)
    assert [(own.policy_version, own.status) for own in groups] == [(4, Status.FILTERED)] * 2
    assert [parse_group(join(own)).tags for own in groups] == [[{"level": 3}]] * 2


def test_nothing_in_is_nothing_out():
    assert encode_groups([]) == []
    batch = make_experience_batch([rollout()])
    for name, tensor in named_tensors(batch).items():
        setattr(batch, name, tensor[:0])
    batch.policy_version, batch.status, batch.group_id = None, Status.COMPLETED, None
    batch.tags, batch.extras = {}, {}
    assert encode_rows(batch) == []


def test_a_layout_says_what_is_in_the_group():
    items = [rollout(policy_version=1), rollout(status=Status.FAILED, tags={"a": 1})]
    layout = parse_group(join(encode_groups([items])[0]))
    assert (layout.samples, layout.policy_versions, layout.group_id) == (2, [1, None], None)
    assert layout.statuses == [Status.COMPLETED, Status.FAILED]
    assert layout.tags == [{}, {"a": 1}]
    assert layout.nbytes == len(layout.blob)
    assert layout.decoded_bytes == 2 * (24 * 16 + 18 * 17 + 4)


REFUSED: dict[str, tuple[list[BufferItem], str]] = {
    "no samples": ([], "0 samples"),
    "dtypes of a field": (
        [rollout(), rollout(kl=torch.zeros(3).double())],
        "kl is torch.float32 in sample 0 and torch.float64 in sample 1",
    ),
    "complex": ([rollout(kl=torch.zeros(3, dtype=torch.complex64))], "kl is torch.complex64"),
    "sparse": ([rollout(kl=torch.ones(3).to_sparse())], "kl"),
    "meta": ([rollout(kl=torch.ones(3, device="meta"))], "kl"),
    "group ids": ([rollout(group_id="a"), rollout(group_id="b")], "'a' and 'b'"),
    "some group id": ([rollout(group_id="a"), rollout()], "'a' and None"),
    "group id of a wrong type": ([rollout(group_id=3)], "group_id"),
    "tag": ([rollout(tags={"bad": [1]})], "tag 'bad'"),
    "none as a tag": ([rollout(tags={"bad": None})], "tag 'bad'"),
    "big tag": ([rollout(tags={"ok": 1, "bad": 2**64})], "tag 'bad'"),
    "tag's key": ([rollout(tags={7: 1})], "key"),
    "long tag's key": ([rollout(tags={"k" * 257: 1})], "257 bytes"),
    "many tags": ([rollout(tags={str(n): n for n in range(257)})], "257 tags"),
    "extra": ([rollout(extras={"ok": 1, "bad": object()})], "extra 'bad'"),
    "tensor as an extra": ([rollout(extras={"bad": torch.ones(1)})], "extra 'bad'"),
    "big extra": ([rollout(extras={"bad": -(2**63) - 1})], "extra 'bad'"),
    "nested number as a key": ([rollout(extras={"bad": [{1: 2}]})], "extra 'bad'"),
    "broken text": ([rollout(extras={"bad": "\ud800"})], "extra 'bad'"),
    "extra's key": ([rollout(extras={1: 1})], "key"),
    "naive time": ([rollout(extras={"bad": datetime(2024, 1, 1)})], "extra 'bad'"),
    "policy version": ([rollout(policy_version="new")], "policy_version"),
    "big policy version": ([rollout(policy_version=2**63)], "64 bits"),
    "status": ([rollout(status="great")], "status"),
    "token versions": ([rollout(token_versions=torch.ones(3))], "token_versions"),
    "rank": ([make(tensors={"deep": torch.zeros([1] * 9)})], "deep"),
    "elements": ([make(tensors={"wide": torch.empty(0, 2**20, 2**20)})], "wide"),
    "name": ([make(tensors={"n" * 257: torch.ones(1)})], "257 bytes"),
    "broken name": ([make(tensors={"\ud800": torch.ones(1)})], "Unicode"),
    "columns": ([make(tensors={str(n): torch.ones(1) for n in range(129)})], "129"),
    "bomb": ([make(tensors={"zeros": torch.zeros(2**28 + 2**20, dtype=torch.int8)})], "runs"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_values_are_refused(what):
    items, message = REFUSED[what]
    with pytest.raises(EncodeError, match=message.replace("(", r"\(")):
        encode_groups([items])


def nested(levels: int) -> list[Any]:
    deep: list[Any] = []
    for _ in range(levels - 1):
        deep = [deep]
    return deep


@pytest.mark.parametrize("levels", [63, 500, 5_000])
def test_a_deep_extra_is_refused(levels):
    with pytest.raises(EncodeError, match="extra 'deep'"):
        encode_groups([[rollout(extras={"deep": nested(levels)})]])


def test_the_deepest_extra_that_is_written_is_read():
    (group,) = encode_groups([[rollout(extras={"deep": nested(62)})]])
    (item,) = decode_items(parse_group(join(group)))
    assert item.extras == {"deep": nested(62)}


def test_extras_of_too_many_lists_and_maps_are_refused_at_put():
    some: list[Any] = [[]] * 200_000
    with pytest.raises(EncodeError, match=r"cannot be stored: .* 262144 lists and maps"):
        encode_groups([[rollout(extras={"a": some, "b": some})]])


def test_a_field_that_is_no_tensor_is_a_record_error():
    for bad in (rollout(kl=[1.0]), make(tensors={"x": 3}), make(tensors={"kl": torch.ones(1)})):
        for encode in (encode_groups, check_and_encode_groups):
            with pytest.raises(RecordError, match=r"kl|x is a"):
                encode([[bad]])


def test_too_many_samples_are_refused():
    with pytest.raises(EncodeError, match="4097 samples"):
        encode_groups([[make()] * 4097])


# What decode_batch makes is what make_experience_batch makes of the samples.

LENGTHS = st.integers(0, 40)


@st.composite
def samples(draw: st.DrawFn) -> list[list[BufferItem]]:
    """Groups of ragged samples that mostly fit in one batch."""
    names = draw(st.sets(st.sampled_from(["values", "kl", "token_versions", "x", "y"])))
    masks = draw(st.sampled_from(["none", "some", "all"]))
    ragged = draw(st.booleans())
    fixed = draw(LENGTHS), draw(LENGTHS)
    dtype = draw(st.sampled_from(ALL_DTYPES))
    groups = []
    for group in range(draw(st.integers(1, 3))):
        items = []
        for _ in range(draw(st.integers(1, 3))):
            tokens, actions = (draw(LENGTHS), draw(LENGTHS)) if ragged else fixed
            seed = draw(st.integers(0, 9))
            pad = draw(st.integers(0, tokens))
            item = rollout(tokens, actions, seed, values=None, kl=torch.tensor(0.5))
            item.sequences[:pad] = draw(st.sampled_from([0, -1, 70_000]))
            if masks == "none" or (masks == "some" and draw(st.booleans())):
                item.attention_mask = item.action_mask = None
            if "values" in names:
                item.values = torch.zeros(actions) if seed % 2 else torch.randn(actions)
            if "kl" in names:
                item.kl = torch.randn(actions)
            if "token_versions" in names:
                item.token_versions = torch.full((actions,), seed)
            if "x" in names:
                item.tensors["x"] = values_of(dtype, (actions, 3), seed)
            if "y" in names:
                item.tensors["y"] = values_of(dtype, (2,), seed)
            item.policy_version = draw(st.none() | st.integers(0, 5))
            item.status = draw(st.sampled_from(Status))
            item.group_id = draw(st.just(f"g{group}"))
            items.append(item)
        groups.append(items)
    return groups


@given(samples(), st.sampled_from(["left", "right"]))
@quick
def test_decode_batch_is_make_experience_batch(groups, side):
    layouts = [parse_group(join(group)) for group in encode_groups(groups)]
    items = [item for layout in layouts for item in decode_items(layout)]
    assert_same(items, [item for group in groups for item in group])
    assert_batches(decode_batch(layouts, side=side), make_experience_batch(items, side=side))


@given(samples(), st.sampled_from(["left", "right"]), st.data())
@quick
def test_a_batch_of_some_tensors_has_them_as_the_whole_one(groups, side, data):
    layouts = [parse_group(join(group)) for group in encode_groups(groups)]
    whole = decode_batch(layouts, side=side)
    present = sorted({field.name for layout in layouts for field in layout.fields})
    names = data.draw(st.sets(st.sampled_from(present), min_size=1))
    found = decode_batch(layouts, side=side, names=names)
    made = {name for name in with_masks(names) if getattr(found, name, None) is not None}
    left_out = set(TENSOR_FIELDS).difference(names, made)
    further = {
        name: tensor
        for name, tensor in whole.tensors.items()
        if name.removesuffix("_lengths") in names
    }
    assert_batches(found, replace(whole, **dict.fromkeys(left_out), tensors=further))


@given(samples(), samples(), st.sampled_from(["left", "right"]))
@settings(quick, max_examples=40)
def test_many_parsed_at_once_make_the_same_batch(groups, others, side):
    lone = [[item] for group in groups for item in group]
    for mix in (lone, lone * 2, lone + groups, lone + others, groups + lone[::-1] + groups):
        blobs = [join(group) for group in encode_groups(mix)]
        layouts = [own for own in parse_groups(blobs) if isinstance(own, GroupLayout)]
        items = [item for group in mix for item in group]
        assert_same([item for own in layouts for item in decode_items(own)], items)
        for chosen, rows in ((layouts, mix), (layouts[1:], mix[1:]), (layouts[::-1], mix[::-1])):
            items = [item for group in rows for item in group]
            try:
                wanted = make_experience_batch(items, side=side)
            except RecordError:
                with pytest.raises(RecordError):
                    decode_batch(chosen, side=side)
            else:
                assert_batches(decode_batch(chosen, side=side), wanted)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_comes_back_from_many_at_once(dtype):
    lead, trail = values_of(dtype, (2,), 3)
    groups = []
    for row, (before, middle, after) in enumerate(
        [(0, 9, 0), (20, 9, 0), (0, 9, 20), (20, 9, 20), (29, 0, 0), (29, 0, 20), (0, 0, 0)]
    ):
        parts = [lead.expand(before), values_of(dtype, (middle,), row), trail.expand(after)]
        groups.append([make(tensors={"x": torch.cat(parts), "y": values_of(dtype, (), row)})])
    encoded = [join(encode_groups([own])[0]) for own in groups]
    for blobs in (encoded, encoded[1:3], encoded[2:3] * 3, encoded[4:5] * 3, encoded[6:] * 2):
        alone = [parse_group(blob) for blob in blobs]
        found = [own for own in parse_groups(blobs) if isinstance(own, GroupLayout)]
        assert_batches(decode_batch(found), decode_batch(alone))


MISFITS = {
    "missing": [rollout(), rollout(kl=None)],
    "dtype": [rollout(), rollout(kl=torch.zeros(18).half())],
    "mask's dtype": [rollout(), rollout(attention_mask=torch.ones(24).bool())],
    "rank": [rollout(), rollout(kl=torch.tensor(1.0))],
    "trailing": [make(tensors={"x": torch.ones(2, 3)}), make(tensors={"x": torch.ones(2, 4)})],
}


@pytest.mark.parametrize("what", MISFITS)
def test_groups_that_do_not_fit_are_a_record_error(what):
    groups = encode_groups([[item] for item in MISFITS[what]])
    layouts = [parse_group(join(group)) for group in groups]
    with pytest.raises(RecordError):
        decode_batch(layouts)
    with pytest.raises(RecordError):
        make_experience_batch(MISFITS[what])


def test_a_batch_needs_groups_and_a_side_and_a_limit(monkeypatch):
    layout = parse_group(join(encode_groups([[rollout()]])[0]))
    with pytest.raises(RecordError, match="at least one"):
        decode_batch([])
    with pytest.raises(RecordError, match="middle"):
        decode_batch([layout], side="middle")
    monkeypatch.setattr("redrb.codec.wire.MAX_BATCH_BYTES", 2 * layout.decoded_bytes)
    decode_batch([layout] * 2, pin=True)
    with pytest.raises(RecordError, match="fewer groups"):
        decode_batch([layout] * 3)
