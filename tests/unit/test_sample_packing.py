"""Samples of slime and miles are stored field by field, and returned as they were."""

from dataclasses import dataclass
from enum import Enum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redrb import BufferItem
from redrb.codec import decode_items, encode_groups, parse_group
from redrb.compat.sample_groups.packing import pack_group, unpack_group
from redrb.errors import DecodeError, RecordError
from tests.framework_stand_ins import Sample


def stored(group, prompts=()):
    """Return the group as it is after it was encoded and decoded."""
    (encoded,) = encode_groups([pack_group(group, prompts)])
    items = decode_items(parse_group(encoded.blob))
    return unpack_group(items, Sample)


def test_every_field_comes_back_as_it_was():
    sample = Sample(
        group_index=3,
        index=24,
        prompt=[{"role": "user", "content": "1 + 1?"}],
        tokens=[5, 2**40, 0],
        response="2",
        response_length=2,
        reward={"score": 0.5, "kinds": ("a", 1)},
        loss_mask=[1, 0],
        weight_versions=["7", "8"],
        rollout_log_probs=[-0.1, -1e-300],
        status=Sample.Status.COMPLETED,
        metadata={"deep": [{"x": None}], "set": {1, 2}, 5: b"bytes"},
    )
    ((back,), prompts) = stored([sample])
    assert back == sample
    assert not prompts
    assert list(map(type, back.tokens)) == [int, int, int]
    assert list(map(type, back.rollout_log_probs)) == [float, float]


def test_arrays_come_back_in_their_containers():
    experts = torch.arange(12, dtype=torch.int16).reshape(2, 3, 2)
    pixels = torch.rand(2, 3).to(torch.bfloat16)
    sample = Sample(
        rollout_routed_experts=experts,
        multimodal_train_inputs={"pixels": pixels, "grid": np.ones((1, 3), np.int32)},
        metadata={"score": np.float32(0.25)},
    )
    as_numpy = Sample(rollout_routed_experts=experts.numpy(), tokens=[])
    (back, other), _ = stored([sample, as_numpy])
    assert torch.equal(back.rollout_routed_experts, experts)
    assert back.rollout_routed_experts.dtype == torch.int16
    assert torch.equal(back.multimodal_train_inputs["pixels"], pixels)
    assert back.multimodal_train_inputs["grid"].dtype == np.int32
    assert type(back.metadata["score"]) is np.float32
    assert isinstance(other.rollout_routed_experts, np.ndarray)
    assert other.tokens == []


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(), inside, max_size=4),
)


@given(st.lists(st.floats(), max_size=9), st.lists(st.integers(-9, 2**63 - 1)), VALUES)
def test_any_numbers_and_metadata_come_back(log_probs, tokens, value):
    sample = Sample(tokens=tokens, rollout_log_probs=log_probs, metadata={"value": value})
    ((back,), _) = stored([sample])
    assert repr(back) == repr(sample)


def test_trajectories_of_several_samples_and_other_prompts_keep_their_places():
    group = [[Sample(index=1), Sample(index=2)], Sample(index=3), [Sample(index=4)]]
    prompts = [Sample(index=1, prompt="q")]
    back, of_prompts = stored(group, prompts)
    assert (back, of_prompts) == (group, prompts)


def test_tools_see_the_reward_and_the_oldest_weight_version():
    versions = [["default", "9"], ["7", "8"], []]
    rewards = [0.5, float("nan"), {"score": 1}]
    pairs = zip(versions, rewards, strict=True)
    items = pack_group([Sample(weight_versions=each, reward=reward) for each, reward in pairs])
    assert [item.policy_version for item in items] == [9, 7, None]
    assert [item.reward for item in items] == [torch.tensor(0.5), None, None]


@dataclass
class Adapter:
    name: str


class Kind(Enum):
    MATH = "math"


@pytest.mark.parametrize(
    "value",
    [
        Adapter("lora"),
        {"inside": [Adapter("lora")]},
        Kind.MATH,
        {Kind.MATH: 1},
        object(),
        1j,
        print,
    ],
)
def test_a_field_that_cannot_be_stored_is_refused_by_name(value):
    with pytest.raises(RecordError, match="field 'reward' of a Sample holds a ") as refusal:
        pack_group([Sample(), Sample(reward=value)])
    assert refusal.value.field == "reward"


def test_arrays_of_objects_and_numbers_that_are_too_large_are_refused_by_name():
    for value in (np.array([object()]), 2**80, torch.ones(3).to_sparse()):
        with pytest.raises(RecordError, match="reward"):
            pack_group([Sample(reward=value)])


def test_values_that_contain_themselves_are_refused():
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(RecordError, match="metadata"):
        pack_group([Sample(metadata={"list": endless})])


def test_a_group_without_samples_is_refused():
    with pytest.raises(RecordError, match="holds no sample"):
        pack_group([[]])


@pytest.mark.parametrize("extras", [{}, {"format": 1}, {"format": 2, "sample": {}}])
def test_other_groups_are_no_samples(extras):
    item = BufferItem(torch.ones(3, dtype=torch.int64), torch.zeros(2), extras=extras)
    with pytest.raises(DecodeError, match=r"redrb\.compat\.slime"):
        unpack_group([item], Sample)
