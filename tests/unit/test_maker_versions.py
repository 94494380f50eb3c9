"""Samples of a maker that know no weight version get that of its weights."""

from types import SimpleNamespace

import pytest
import torch

from redrb.experience import BufferItem, make_experience_batch
from redrb.experience.rows import select_rows
from redrb.train.maker import Maker


def _batch(*versions):
    return make_experience_batch(
        [
            BufferItem(
                sequences=torch.tensor([1, 2]),
                action_log_probs=torch.zeros(1),
                reward=torch.tensor(1.0),
                policy_version=version,
            )
            for version in versions
        ]
    )


@pytest.mark.parametrize(
    ("given", "noted"), [((None, None), [7, 7]), ((None, 3), [7, 3]), ((0, 3), [0, 3])]
)
def test_each_sample_of_a_part_without_a_version_gets_that_of_the_weights(given, noted):
    batch = _batch(*given)
    if given == (None, None):
        batch.policy_version = None  # as experience makers leave it
        batch = select_rows(batch, [1, 0])  # groups whose rewards were ready first
    parts = SimpleNamespace(make_parts=lambda _: iter([batch]))
    maker = object.__new__(Maker)
    maker.experience_maker, maker.generate_kwargs, maker._streams = parts, {}, []
    maker._weights = SimpleNamespace(begin_batch=lambda: (7, {}))
    (part,) = maker._parts(["a prompt"])
    assert part.policy_version == noted
