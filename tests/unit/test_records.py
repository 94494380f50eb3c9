"""Samples and padded batches keep ColossalAI's contract, and padding never turns into tokens."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import pytest
import torch

from redrb import BufferItem, Experience, Status, make_experience_batch, split_experience_batch
from redrb.codec import decode_batch, encode_groups, parse_groups
from redrb.errors import ConfigError, EncodeError, RecordError
from redrb.experience.batching import _zero_pad_sequences, padded_rows
from redrb.experience.records import STANDARD_FIELDS
from redrb.experience.status import group_status
from redrb.stream.task.tags import declare_tags
from tests.samples import assert_same, numbered, random_item

SIDES = ["left", "right"]


def item(length: int, actions: int, **changes: Any) -> BufferItem:
    """Return a sample whose tensors count up from 1, so that padding shows."""
    return BufferItem(
        sequences=torch.arange(1, length + 1),
        action_log_probs=torch.arange(1, actions + 1).float(),
        values=changes.pop("values", torch.arange(1, actions + 1).float()),
        reward=torch.tensor(2.0),
        kl=changes.pop("kl", torch.tensor(0.5)),
        advantages=changes.pop("advantages", torch.tensor(0.25)),
        **changes,
    )


def test_the_eight_fields_come_in_coatis_order():
    names = ["sequences", "action_log_probs", "values", "reward", "kl", "advantages"]
    names += ["attention_mask", "action_mask"]
    assert list(STANDARD_FIELDS) == names
    for record in (BufferItem, Experience):
        assert [field.name for field in fields(record)][:8] == names
    tensors = [torch.tensor([n]) for n in range(8)]
    assert [int(getattr(Experience(*tensors), name)) for name in names] == list(range(8))
    assert Experience(*tensors[:6]).attention_mask is None
    assert Experience(*tensors[:6]).action_mask is None


def test_all_fields_after_the_log_probs_are_optional_and_given_by_name():
    tokens, log_probs, advantages = torch.arange(3), torch.zeros(2), torch.ones(2)
    made = BufferItem(tokens, log_probs, advantages=advantages)
    assert made.sequences is tokens
    assert made.action_log_probs is log_probs
    assert made.advantages is advantages
    assert all(getattr(made, name) is None for name in STANDARD_FIELDS[2:] if name != "advantages")
    with pytest.raises(TypeError, match="positional"):
        BufferItem(tokens, log_probs, None, torch.tensor(1.0), advantages, None)


def test_shorter_samples_are_padded_with_zeros_on_the_left():
    batch = make_experience_batch([item(3, 1), item(5, 2)])
    assert batch.sequences.tolist() == [[0, 0, 1, 2, 3], [1, 2, 3, 4, 5]]
    assert batch.action_log_probs.tolist() == [[0, 1], [1, 2]]
    assert batch.values.tolist() == [[0, 1], [1, 2]]
    assert batch.reward.tolist() == [2, 2]
    assert batch.padding_side == "left"
    assert len(batch) == 2


def test_padding_goes_to_the_right_on_request():
    batch = make_experience_batch([item(3, 1), item(5, 2)], side="right")
    assert batch.sequences.tolist() == [[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]]
    assert batch.action_log_probs.tolist() == [[1, 0], [1, 2]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize("side", ["top", "", "LEFT", "both"])
def test_another_side_is_an_error(side):
    with pytest.raises(RecordError, match="side"):
        make_experience_batch([item(3, 1)], side=side)
    with pytest.raises(RecordError, match="side"):
        _zero_pad_sequences([torch.ones(2)], side)
    batch = make_experience_batch([item(3, 1)])
    batch.padding_side = side
    with pytest.raises(RecordError, match="side"):
        split_experience_batch(batch)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16])
def test_padding_keeps_the_dtype(side, dtype):
    padded = _zero_pad_sequences([torch.ones(2).to(dtype), torch.ones(4).to(dtype)], side)
    assert padded.dtype == dtype
    expected = [0, 0, 1, 1] if side == "left" else [1, 1, 0, 0]
    assert padded[0].int().tolist() == expected
    assert padded[1].int().tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("lengths", [[(3, 2)], [(3, 2)] * 2, [(3, 0)] * 2, [(3, 3), (4, 1)]])
@pytest.mark.parametrize(
    "without", [(), ("action_log_probs",), ("action_log_probs", "values"), ("sequences",)]
)
def test_a_batch_always_has_the_masks_of_its_tokens_and_actions(lengths, without, side):
    items = [
        item(*each, values=torch.tensor(0.5), token_versions=torch.ones(each[1]).long())
        for each in lengths
    ]
    for each in items:
        for name in without:
            setattr(each, name, None)
    (layout,) = parse_groups([group.blob for group in encode_groups([items])])
    for batch in (make_experience_batch(items, side=side), decode_batch([layout], side=side)):
        assert batch.action_mask.dtype == torch.bool
        assert batch.action_mask.sum(1).tolist() == [actions for _, actions in lengths]
        assert torch.equal(batch.action_mask, batch.token_versions == 1)
        if "sequences" in without:
            assert batch.attention_mask is None
        else:
            assert torch.equal(batch.attention_mask, (batch.sequences != 0).long())
    flat = item(3, 2, values=torch.tensor(0.5))
    flat.sequences = flat.action_log_probs = None
    batch = make_experience_batch([flat, flat])
    assert (batch.attention_mask, batch.action_mask) == (None, None)  # there are no lengths


@pytest.mark.parametrize("side", SIDES)
def test_samples_without_a_mask_get_one_where_others_bring_theirs(side):
    masked = item(4, 2, attention_mask=torch.tensor([False, True, True, True]))
    batch = make_experience_batch([masked, item(2, 2)], side=side)
    assert batch.attention_mask.dtype == torch.bool
    assert batch.attention_mask[1].sum() == 2
    assert batch.attention_mask[0].tolist() == [False, True, True, True]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("scalars", [True, False])
@pytest.mark.parametrize("masks", [True, False])
def test_split_returns_the_samples_that_make_was_given(side, scalars, masks):
    dice = random.Random(0)
    items = [random_item(dice, scalars=scalars, masks=masks) for _ in range(12)]
    batch = make_experience_batch(items, side=side)
    for got, expected in zip(split_experience_batch(batch), items, strict=True):
        if not masks:  # made by the batch, and right
            assert got.attention_mask is None or bool(got.attention_mask.all())
            assert got.action_mask is None or bool(got.action_mask.all())
            got.attention_mask = got.action_mask = None
        assert_same(got, expected)


@pytest.mark.parametrize("side", SIDES)
def test_values_kl_and_advantages_may_be_scalars_or_a_number_an_action(side):
    scalar, vector = torch.tensor(1.0), torch.arange(1, 3).float()
    batch = make_experience_batch([item(4, 2, values=scalar, kl=vector, advantages=vector)] * 2)
    assert (batch.values.shape, batch.kl.shape) == ((2,), (2, 2))
    with pytest.raises(RecordError, match="values") as caught:
        make_experience_batch([item(4, 2, values=scalar), item(4, 2, values=vector)], side=side)
    assert caught.value.field == "values"


def test_a_row_whose_mask_is_zero_everywhere_stays_whole():
    masked = item(
        3, 2, attention_mask=torch.ones(3).long(), action_mask=torch.zeros(2, dtype=torch.bool)
    )
    (got,) = split_experience_batch(make_experience_batch([masked]))
    assert_same(got, masked)


def test_masked_tokens_inside_a_sample_are_no_padding():
    masked = item(4, 2, attention_mask=torch.tensor([0, 1, 0, 1]), action_mask=torch.ones(2).bool())
    for side in SIDES:
        batch = make_experience_batch([masked, item(6, 2)], side=side)
        assert_same(split_experience_batch(batch)[0], masked)


@pytest.mark.parametrize("name", [name for name in STANDARD_FIELDS if name != "sequences"])
def test_another_batch_size_is_an_error_that_names_the_field(name):
    batch = make_experience_batch([random_item(random.Random(n)) for n in range(3)])
    setattr(batch, name, getattr(batch, name)[:2])
    with pytest.raises(RecordError, match=name) as caught:
        split_experience_batch(batch)
    assert caught.value.field == name


@pytest.mark.parametrize("name", ["status", "group_id", "policy_version", "tags", "extras"])
def test_metadata_of_another_length_is_an_error_that_names_it(name):
    batch = make_experience_batch([item(3, 2)] * 3)
    setattr(batch, name, getattr(batch, name)[:2])
    with pytest.raises(RecordError, match=name):
        split_experience_batch(batch)


def test_a_field_without_a_batch_dimension_is_an_error():
    batch = make_experience_batch([item(3, 2)])
    batch.reward = torch.tensor(1.0)
    with pytest.raises(RecordError, match="reward has no batch dimension"):
        len(batch)


def test_mixed_dtypes_are_an_error_that_names_the_field():
    narrow = item(3, 2, values=torch.ones(2, dtype=torch.float16))
    with pytest.raises(RecordError, match=r"values is torch\.float32 in sample 0"):
        make_experience_batch([item(3, 2), narrow])


def test_a_field_that_only_some_samples_have_is_an_error():
    with pytest.raises(RecordError, match="values is None in sample 1"):
        make_experience_batch([item(3, 2), item(3, 2, values=None)])
    with pytest.raises(RecordError, match="logits"):
        make_experience_batch([item(3, 2, tensors={"logits": torch.ones(2)}), item(3, 2)])


def test_no_samples_are_no_batch():
    with pytest.raises(RecordError, match="at least one"):
        make_experience_batch([])
    with pytest.raises(RecordError, match="no tensor"):
        len(Experience(None, None, None, None, None, None))


def test_a_field_that_is_no_tensor_is_an_error_that_names_it_and_its_type():
    with pytest.raises(RecordError, match="reward is a float"):
        make_experience_batch([numbered(1, reward=0.5)])
    with pytest.raises(RecordError, match="standard field"):
        make_experience_batch([item(3, 2, tensors={"kl": torch.ones(1)})])
    for wrong in ([1], "x", None, {"x"}):
        with pytest.raises(RecordError, match="not a dict of tensors") as caught:
            make_experience_batch([item(3, 2, tensors=wrong)])
        assert caught.value.field == "tensors"


@pytest.mark.parametrize("wrong", [[1], 3, "ab", [("a", 1)]])
def test_tags_and_extras_of_other_types_are_errors_of_redrb(wrong):
    for name in ("tags", "extras"):
        for group in ([numbered(1, **{name: wrong})], [numbered(1), numbered(2, **{name: wrong})]):
            with pytest.raises(EncodeError, match=f"{name} is a .* give a dict"):
                encode_groups([group])
        batch = make_experience_batch([numbered(1), numbered(2)])
        setattr(batch, name, wrong)
        with pytest.raises((EncodeError, RecordError)):
            encode_groups([padded_rows(batch)])
    with pytest.raises(ConfigError, match="no list of names"):
        declare_tags(3)


def test_further_tensors_are_padded_and_split_too():
    items = [item(3, 2, tensors={"logits": torch.ones(n, 4)}) for n in (2, 3)]
    batch = make_experience_batch(items)
    assert batch.tensors["logits"].shape == (2, 3, 4)
    assert batch.tensors["logits"][0, 0].tolist() == [0, 0, 0, 0]


def test_token_versions_are_padded_with_minus_one():
    items = [item(4, n, token_versions=torch.full((n,), 7)) for n in (1, 3)]
    batch = make_experience_batch(items)
    assert batch.token_versions.tolist() == [[-1, -1, 7], [7, 7, 7]]
    assert split_experience_batch(batch)[0].token_versions.tolist() == [7]


def test_metadata_goes_through_make_and_split():
    masks = {"attention_mask": torch.ones(3).long(), "action_mask": torch.ones(2).bool()}
    known = {"policy_version": 4, "status": Status.ABORTED, "group_id": "a", "tags": {"score": 1.0}}
    items = [item(3, 2, **masks, **known), item(3, 2, **masks, extras={"m": [{"role": "user"}]})]
    batch = make_experience_batch(items)
    assert batch.policy_version == [4, None]
    assert batch.status == [Status.ABORTED, Status.COMPLETED]
    for got, expected in zip(split_experience_batch(batch), items, strict=True):
        assert_same(got, expected)


def test_a_single_value_of_metadata_stands_for_all_rows():
    batch = make_experience_batch([item(3, 2)] * 2)
    batch.policy_version, batch.group_id, batch.tags = 5, "prompt", {"score": 1}
    first, second = split_experience_batch(batch)
    assert (first.policy_version, second.policy_version) == (5, 5)
    first.tags["score"] = 2
    assert second.tags == {"score": 1}
    assert second.group_id == "prompt"


def test_to_device_moves_every_tensor_and_leaves_none():
    batch = make_experience_batch([item(3, 2, tensors={"logits": torch.ones(3)})])
    assert batch.to_device("meta") is batch
    moved = [tensor for tensor in vars(batch).values() if isinstance(tensor, torch.Tensor)]
    assert len(moved) == 8
    assert {tensor.device.type for tensor in (*moved, batch.tensors["logits"])} == {"meta"}
    assert batch.token_versions is None


def test_pin_memory_returns_the_batch_itself():
    batch = make_experience_batch([item(3, 2)])
    assert batch.pin_memory() is batch
    pinned = torch.accelerator.is_available()
    assert batch.sequences.is_pinned() == pinned


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ("completed completed", "completed"),
        ("completed failed aborted", "failed"),
        ("filtered expired aborted", "aborted"),
        ("filtered expired completed", "expired"),
        ("completed filtered", "filtered"),
        ("init init", "init"),
        ("archived archived", "archived"),
        ("", "init"),
    ],
)
def test_a_groups_status_follows_its_members(members, expected):
    assert group_status(Status(name) for name in members.split()) == Status(expected)
