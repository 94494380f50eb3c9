"""A lease of several parts: one batch, and ids that find their part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from redrb.codec import encode_groups, parse_groups
from redrb.codec.decode import _Column
from redrb.connection.deadline import here
from redrb.errors import ConfigError, LeaseLost, RecordError, StoreUnavailable
from redrb.experience import BufferItem
from redrb.stream import Lease
from redrb.stream.take.calls import Outcome
from redrb.stream.take.cause import Cause
from redrb.stream.take.part import Draw, LeasePart
from tests.samples import numbered, numbers

Ended = tuple[str, tuple[int, ...], int, bool]


class Recorder:
    """A holder that records how groups ended, and the requests for it.

    Attributes:
        loss: Why its lease is lost, if it is.
        away: Requests that fail before its server is back.
    """

    whole: tuple[Outcome, ...] = ()

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name
        self.loss = ""
        self.away = 0
        self.ended: list[Ended] = []
        self.abandoned: list[tuple[int, ...]] = []

    def end_request(
        self, outcome: Outcome, ids: Sequence[int], *, reason: Cause, samples: int, ends: bool
    ) -> Ending:
        return Ending(self, (outcome, tuple(ids), samples, ends))

    def release(self, ids: Sequence[int]) -> None:
        raise NotImplementedError

    def abandon(self, ids: tuple[int, ...]) -> None:
        self.abandoned.append(ids)


class Ending:
    """The request that ends groups of a `Recorder`."""

    retry_s = 7.0

    def __init__(self, holder: Recorder, ended: Ended) -> None:
        self.holder, self.ended = holder, ended

    def begin(self) -> None:
        self.holder.log.append(f"send {self.holder.name}")

    def result(self) -> str:
        retries = "with retries" if here().repeats_s else "once"
        self.holder.log.append(f"read {self.holder.name} {retries}")
        if self.holder.away:
            self.holder.away -= 1
            raise StoreUnavailable("not reachable", where="host:1")
        self.holder.ended.append(self.ended)
        return self.holder.loss

    def drop(self) -> None:
        self.holder.log.append(f"drop {self.holder.name}")


def part(
    holder: Recorder, groups: dict[int, list[BufferItem]], draw: Draw | None = None
) -> LeasePart:
    blobs = [group.blob for group in encode_groups(list(groups.values()))]
    layouts = parse_groups(blobs)
    return LeasePart("math", list(zip(groups, layouts, strict=True)), holder, draw=draw)


@pytest.fixture
def log():
    return []


@pytest.fixture
def holders(log):
    return [Recorder(log, "first"), Recorder(log, "second")]


@pytest.fixture
def lease(holders):
    first = part(
        holders[0], {1: [numbered(1)], 3: [numbered(3), numbered(3)]}, Draw({1: 1, 3: 2}, 6)
    )
    second = part(holders[1], {2: [numbered(2)]}, Draw({2: 3}, 4))
    return Lease([first, second])


def test_parts_are_one_batch(lease):
    assert (len(lease), lease.samples, lease.ids) == (3, 4, (1, 3, 2))
    assert numbers(lease) == [1, 3, 3, 2]
    batch = lease.batch()
    assert batch.reward.tolist() == [1, 3, 3, 2]
    assert list(lease.layouts) == [1, 3, 2]


def test_draws_of_parts_are_draws_from_all_of_them(lease):
    assert lease.probabilities == pytest.approx([0.1, 0.2, 0.3])
    weights = lease.importance_weights(beta=1.0)
    assert weights.tolist() == pytest.approx([1, 0.5, 0.5, 1 / 3])


def test_ids_end_in_their_part(lease, holders):
    with pytest.raises(ConfigError, match=r"\[9\] are not in this lease"):
        lease.ack([1, 9])
    lease.ack([2, 1])
    lease.reject("nan")
    assert holders[0].ended == [("ack", (1,), 1, False), ("reject", (3,), 2, True)]
    assert holders[1].ended == [("ack", (2,), 1, True)]
    with pytest.raises(LeaseLost, match=r"'math'.*ended already"):
        lease.release()


def test_a_lost_part_is_named_when_the_others_are_ended(lease, holders):
    holders[0].loss = "its heartbeat stopped"
    with pytest.raises(LeaseLost) as caught:
        lease.ack()
    assert caught.value.ids == (1, 3)
    assert holders[1].ended == [("ack", (2,), 1, True)]
    assert not lease


def test_parts_whose_server_answers_end_although_another_one_is_away(lease, holders, log, pages):
    pages(ended=1)
    holders[0].away = 2
    with pytest.raises(StoreUnavailable, match=r"groups of task 'math' were not ended"):
        lease.ack()
    rounds = ["send first", "send second", "read first once", "read second once"]
    assert log == [*rounds, "read first with retries"]
    assert lease.ids == (1, 3)
    assert holders[1].ended == [("ack", (2,), 1, True)]
    lease.ack()
    assert holders[0].ended == [("ack", (1,), 1, False), ("ack", (3,), 2, True)]
    assert len(holders[1].ended) == 1


def test_a_server_that_is_back_at_once_is_no_error(lease, holders):
    holders[0].away = holders[1].away = 1
    lease.release()
    assert [len(holder.ended) for holder in holders] == [1, 1]


def test_a_loss_is_raised_by_the_call_that_ends_the_last_groups(lease, holders, pages):
    pages(ended=1)
    holders[0].away, holders[1].loss = 2, "its heartbeat stopped"
    with pytest.raises(StoreUnavailable) as caught:
        lease.ack()
    assert "the lease on 1 group is lost" in "".join(caught.value.__notes__)
    with pytest.raises(LeaseLost) as lost:
        lease.ack()
    assert lost.value.ids == (2,)
    assert [len(holder.ended) for holder in holders] == [2, 1]
    assert not lease


def test_pages_end_with_their_bytes_where_payloads_are_copied(lease, holders, pages):
    pages(copied_bytes=1)
    lease.fail("nan", [1, 3])
    assert [ids for _, ids, _, _ in holders[0].ended] == [(1,), (3,)]


@pytest.mark.parametrize(
    ("error", "outcome"), [(ZeroDivisionError, "fail"), (KeyboardInterrupt, "release")]
)
def test_a_block_ends_all_parts(lease, holders, error, outcome):
    with pytest.raises(error), lease:
        raise error
    assert [holder.ended for holder in holders] == [
        [(outcome, (1, 3), 3, True)],
        [(outcome, (2,), 1, True)],
    ]


def test_misfits_are_rejected_in_their_part_and_the_others_released(holders):
    odd = numbered(3, values=torch.zeros(2))
    parts = [
        part(holders[0], {1: [numbered(1)], 3: [odd]}),
        part(holders[1], {2: [numbered(2)]}),
    ]
    with pytest.raises(RecordError) as caught, Lease(parts) as lease:
        lease.batch()
    assert caught.value.ids == (3,)
    assert holders[0].ended == [("reject", (3,), 1, False), ("release", (1,), 1, True)]
    assert holders[1].ended == [("release", (2,), 1, True)]


def test_a_batch_has_the_tensors_that_are_named_with_masks_and_lengths(holders, monkeypatch):
    tensors = [{"x": torch.ones(n, 2), "y": torch.ones(4)} for n in (1, 2)]
    held = Lease([part(holders[0], {n: [numbered(n, tensors=tensors[n - 1])] for n in (1, 2)})])
    whole, decoded = held.batch(), []
    padded = _Column.padded

    def spy(column: _Column, *arguments: Any, **options: Any) -> torch.Tensor:
        decoded.append(column.name)
        return padded(column, *arguments, **options)

    monkeypatch.setattr(_Column, "padded", spy)
    batch = held.batch(tensors=iter(["reward", "x", "sequences"]))
    assert sorted(decoded) == ["reward", "sequences", "x"]
    assert batch.tensors.keys() == {"x", "x_lengths"}
    for name in ("reward", "sequences", "attention_mask", "group_index"):
        assert torch.equal(getattr(batch, name), getattr(whole, name))
    assert torch.equal(batch.tensors["x"], whole.tensors["x"])
    assert batch.action_log_probs is batch.action_mask is batch.values is None
    assert batch.policy_version == whole.policy_version
    assert held.batch(tensors=["action_log_probs"]).action_mask.all()
    assert held.batch(tensors={"sequences", "attention_mask"}).attention_mask.all()


def test_a_mask_that_some_samples_lack_is_filled_up_from_tensors_that_are_left_out(holders):
    masked = numbered(1, action_mask=torch.tensor([True, False]))
    held = Lease([part(holders[0], {1: [masked], 2: [numbered(2)]})])
    for names in (["kl"], ["action_mask"]):
        assert held.batch(tensors=names).action_mask.tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize("tensors", ["reward", [], [1], 5, {"reward": 1}, b"reward"])
def test_names_of_tensors_are_a_list(lease, tensors):
    with pytest.raises(ConfigError, match=r"tensors=.*give a list"):
        lease.batch(tensors=tensors)


@pytest.mark.parametrize("name", ["rewards", "routed_experts", "action_mask", "token_versions"])
def test_a_tensor_that_no_group_has_is_an_error_with_those_that_they_have(lease, name):
    known = "They have sequences, action_log_probs, values, reward, kl, advantages"
    with pytest.raises(ConfigError, match=rf"no group of this batch has {name}\. {known}\."):
        lease.batch(tensors=["sequences", name])
    assert len(lease) == 3


def test_groups_may_differ_in_tensors_that_are_left_out(holders):
    """The group that differs in a tensor of the batch is rejected, and no other one."""
    groups = {
        1: [numbered(1)],
        2: [numbered(2, values=torch.zeros(2))],
        3: [numbered(3, tensors={"x": torch.ones(2)})],
        4: [numbered(4, kl=torch.tensor(1.0).half())],
    }
    held = Lease([part(holders[0], groups)])
    assert held.batch(tensors=["reward"]).reward.tolist() == [1, 2, 3, 4]
    with pytest.raises(RecordError) as caught, held:
        held.batch(tensors=["reward", "kl"])
    assert caught.value.ids == (4,)
    assert holders[0].ended == [("reject", (4,), 1, False), ("release", (1, 2, 3), 3, True)]


def test_parts_of_a_dropped_lease_are_abandoned(lease, holders):
    lease.ack([1])
    lease.abandon()
    assert [holder.abandoned for holder in holders] == [[(1, 3)], [(2,)]]
    assert not lease
