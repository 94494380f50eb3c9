"""A lease of several parts: one batch, and ids that find their part."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from redrb.codec import encode_groups, parse_groups
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


def test_parts_of_a_dropped_lease_are_abandoned(lease, holders):
    lease.ack([1])
    lease.abandon()
    assert [holder.abandoned for holder in holders] == [[(1, 3)], [(2,)]]
    assert not lease
