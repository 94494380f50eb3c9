"""Samples and batches are checked before they are stored; messages name group, sample and field."""

import math

import pytest
import torch

from redrb import make_experience_batch
from redrb.errors import RecordError
from redrb.experience.batching import padded_rows
from redrb.experience.checking import check_groups
from tests.samples import numbered


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"sequences": torch.ones(3)}, r"sequences is torch\.float32.*\.long\(\)"),
        ({"sequences": torch.ones(1, 3).long()}, r"sequences has shape \[1, 3\], not \[S\]"),
        ({"action_log_probs": torch.zeros(4)}, r"length 4 and sequences 3: the actions are"),
        ({"action_log_probs": torch.zeros(2, 1)}, r"action_log_probs has shape \[2, 1\]"),
        ({"reward": torch.ones(1)}, r"reward has shape \[1\], not \[\]"),
        ({"reward": 1.0}, r"reward is a float, not a torch\.Tensor"),
        ({"values": torch.zeros(2, 2)}, r"values has shape \[2, 2\], not \[\] or \[A\]"),
        ({"values": torch.zeros(3)}, r"values has length 3"),
        ({"attention_mask": torch.ones(2)}, r"attention_mask has length 2 and sequences 3"),
        ({"attention_mask": torch.ones(7)}, r"attention_mask has length 7"),
        ({"action_mask": torch.ones(1) > 0}, r"action_mask has length 1 and action_log_probs 2"),
        ({"token_versions": torch.zeros(2)}, r"token_versions is torch\.float32"),
        ({"policy_version": -1}, r"policy_version is -1: it is an int >= 0"),
        ({"policy_version": 1.5}, r"policy_version is 1\.5"),
        ({"policy_version": True}, r"policy_version is True"),
    ],
)
def test_a_malformed_sample_is_refused_with_its_place(changes, match):
    groups = [[numbered(1)], [numbered(0), numbered(2, **changes)]]
    with pytest.raises(RecordError, match=f"{match}.*sample 1 in group 1") as caught:
        check_groups(groups)
    (field,) = changes
    assert caught.value.field in (field, "action_log_probs")


@pytest.mark.parametrize("item", [{"sequences": 1}, [numbered(1)], None, 3, torch.ones(2)])
def test_an_element_that_is_no_sample_is_refused(item):
    with pytest.raises(RecordError, match=r"group 1 holds a .*BufferItem"):
        check_groups([[numbered(1)], [item]])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"sequences": torch.ones(2, 3)}, r"sequences is torch\.float32"),
        ({"reward": torch.ones(2, 1)}, r"reward has shape \[1\], not \[\]"),
        ({"values": torch.ones(2, 2, 2)}, r"values has shape \[2, 2\], not \[\] or \[A\]"),
        ({"values": torch.ones(2, 3)}, r"values has length 3"),
        ({"attention_mask": torch.ones(2, 7)}, r"attention_mask has length 7"),
        ({"action_mask": torch.ones(2, 1)}, r"action_mask has length 1"),
        ({"reward": torch.ones(3)}, r"reward holds 3 samples"),
        ({"reward": torch.tensor(1.0)}, r"reward has no batch dimension"),
        (
            {"action_log_probs": torch.zeros(2, 5), "action_mask": None},
            r"has length 5 and sequences 3",
        ),
        ({"policy_version": [1, -2]}, r"policy_version is -2"),
        ({"policy_version": True}, r"policy_version is True"),
    ],
)
def test_a_malformed_batch_is_refused(changes, match):
    batch = make_experience_batch([numbered(0), numbered(1)])
    for name, value in changes.items():
        setattr(batch, name, value)
    with pytest.raises(RecordError, match=match):
        check_groups([[row] for row in padded_rows(batch)])


@pytest.mark.parametrize("version", [None, 0, 7, torch.tensor(3)])
def test_sound_samples_and_batches_pass(version):
    samples = [numbered(1, policy_version=version), numbered(2)]
    assert check_groups([samples, []]) == {}
    assert check_groups([padded_rows(make_experience_batch(samples))]) == {}


@pytest.mark.parametrize("reward", [math.nan, -math.inf])
def test_rewards_that_are_not_finite_are_found_and_not_raised(reward):
    bad = numbered(1, reward=torch.tensor(reward))
    found = check_groups([[numbered(0)], [numbered(0), bad, bad], [bad]])
    assert list(found) == [1, 2]
    assert f"reward of sample 1 in group 1 is {reward}" in str(found[1])
    assert "finite_rewards" in str(found[2])


def test_rewards_may_have_any_dtype_and_gradients():
    rewards = [
        torch.tensor(1, dtype=torch.int64),
        torch.tensor(2.0, dtype=torch.bfloat16, requires_grad=True),
        None,
    ]
    assert check_groups([[numbered(0, reward=reward) for reward in rewards]]) == {}
