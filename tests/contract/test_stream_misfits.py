"""Groups that do not fit into one batch: only these are given up."""

from __future__ import annotations

import pytest
import torch

from redrb import BufferItem, ExperienceStream
from redrb.connection import Client
from redrb.errors import RecordError
from tests.audit import audit
from tests.samples import numbered, numbers


def narrow(number: int) -> BufferItem:
    return numbered(number, action_log_probs=torch.zeros(2, dtype=torch.float16))


def mixing(client: Client, namespace: str) -> ExperienceStream:
    """Return a stream whose puts do not refuse groups of other dtypes: takes find them then."""
    return ExperienceStream(client, "math", namespace=namespace, checks=["values", "versions"])


def test_only_the_odd_group_goes_to_the_dead_letters(client: Client, namespace: str) -> None:
    with mixing(client, namespace) as stream:
        stream.put_many([[numbered(0)], [narrow(1)], [numbered(2)], [numbered(3)]])
        with pytest.raises(RecordError, match="float16") as caught, stream.take(4) as lease:
            odd = lease.ids[1]
            lease.batch()
        assert caught.value.ids == (odd,)
        (letter,) = stream.dead_letters()
        assert letter.id == odd
        assert "does not fit into a batch" in letter.reason
        with stream.take(3, timeout=0) as lease:
            assert numbers(lease) == [0, 2, 3]
            lease.batch()
        audit(stream)
        assert stream.stats().ledger.acked == 3


def test_a_mixed_batch_can_still_be_read_one_by_one(client: Client, namespace: str) -> None:
    with mixing(client, namespace) as stream:
        stream.put_many([[numbered(0)], [narrow(1)]])
        with stream.take(2, timeout=0) as lease:
            assert numbers(lease) == [0, 1]
        assert stream.stats().ledger.acked == 2


def test_masks_that_only_some_bring_fit(client: Client, namespace: str) -> None:
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        masked = numbered(1, action_mask=torch.tensor([True, False]))
        stream.put_many([[numbered(0)], [masked]])
        with stream.take(2, timeout=0) as lease:
            mask = lease.batch().action_mask
        assert mask is not None
        assert mask.tolist() == [[True, True], [True, False]]
