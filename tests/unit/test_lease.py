"""A lease of several parts: one batch, and ids that find their part."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from redrb.codec import encode_groups, parse_groups
from redrb.errors import ConfigError, LeaseLost, RecordError
from redrb.experience import BufferItem
from redrb.stream import Lease
from redrb.stream.take.cause import Cause
from redrb.stream.take.lease_part import Draw, LeasePart
from redrb.stream.take.scripts import Outcome
from tests.samples import numbered, numbers

Ended = tuple[str, tuple[int, ...], int, bool]


class Recorder:
    """A holder that records how groups ended."""

    def __init__(self, *, held: bool = True) -> None:
        self.held = held
        self.ended: list[Ended] = []
        self.abandoned: list[tuple[int, ...]] = []

    def finish(
        self, outcome: Outcome, ids: Sequence[int], *, reason: Cause, samples: int, ends: bool
    ) -> bool:
        self.ended.append((outcome, tuple(ids), samples, ends))
        return self.held

    def abandon(self, ids: tuple[int, ...]) -> None:
        self.abandoned.append(ids)


def part(
    holder: Recorder, groups: dict[int, list[BufferItem]], draw: Draw | None = None
) -> LeasePart:
    blobs = [group.blob for group in encode_groups(list(groups.values()))]
    layouts = parse_groups(blobs)
    return LeasePart("math", list(zip(groups, layouts, strict=True)), holder, draw=draw)  # type: ignore[arg-type]


@pytest.fixture
def holders() -> list[Recorder]:
    return [Recorder(), Recorder()]


@pytest.fixture
def lease(holders: list[Recorder]) -> Lease:
    first = part(
        holders[0], {1: [numbered(1)], 3: [numbered(3), numbered(3)]}, Draw({1: 1, 3: 2}, 6)
    )
    second = part(holders[1], {2: [numbered(2)]}, Draw({2: 3}, 4))
    return Lease([first, second])


def test_parts_are_one_batch(lease: Lease) -> None:
    assert (len(lease), lease.samples, lease.ids) == (3, 4, (1, 3, 2))
    assert numbers(lease) == [1, 3, 3, 2]
    batch = lease.batch()
    assert batch.reward is not None
    assert batch.reward.tolist() == [1, 3, 3, 2]
    assert list(lease.layouts) == [1, 3, 2]


def test_draws_of_parts_are_draws_from_all_of_them(lease: Lease) -> None:
    assert lease.probabilities == pytest.approx([0.1, 0.2, 0.3])
    weights = lease.importance_weights(beta=1.0)
    assert weights.tolist() == pytest.approx([1, 0.5, 0.5, 1 / 3])


def test_ids_end_in_their_part(lease: Lease, holders: list[Recorder]) -> None:
    with pytest.raises(ConfigError, match=r"\[9\] are not in this lease"):
        lease.ack([1, 9])
    lease.ack([2, 1])
    lease.reject("nan")
    assert holders[0].ended == [("ack", (1,), 1, False), ("reject", (3,), 2, True)]
    assert holders[1].ended == [("ack", (2,), 1, True)]
    with pytest.raises(LeaseLost, match=r"'math'.*ended already"):
        lease.release()


def test_a_lost_part_is_named_when_the_others_are_ended(
    lease: Lease, holders: list[Recorder]
) -> None:
    holders[0].held = False
    with pytest.raises(LeaseLost) as caught:
        lease.ack()
    assert caught.value.ids == (1, 3)
    assert holders[1].ended == [("ack", (2,), 1, True)]
    assert not lease


def test_an_outage_between_parts_leaves_the_rest_to_the_same_call(
    lease: Lease, holders: list[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*arguments: object, **options: object) -> bool:
        raise ConnectionError

    with monkeypatch.context() as outage, pytest.raises(ConnectionError):
        outage.setattr(holders[1], "finish", away)
        lease.ack()
    assert lease.ids == (2,)
    lease.ack()
    assert holders[0].ended == [("ack", (1, 3), 3, True)]
    assert holders[1].ended == [("ack", (2,), 1, True)]


@pytest.mark.parametrize(
    ("error", "outcome"), [(ZeroDivisionError, "fail"), (KeyboardInterrupt, "release")]
)
def test_a_block_ends_all_parts(
    lease: Lease, holders: list[Recorder], error: type[BaseException], outcome: str
) -> None:
    with pytest.raises(error), lease:
        raise error
    assert [holder.ended for holder in holders] == [
        [(outcome, (1, 3), 3, True)],
        [(outcome, (2,), 1, True)],
    ]


def test_misfits_are_rejected_in_their_part_and_the_others_released(
    holders: list[Recorder],
) -> None:
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


def test_parts_of_a_dropped_lease_are_abandoned(lease: Lease, holders: list[Recorder]) -> None:
    lease.ack([1])
    lease.abandon()
    assert [holder.abandoned for holder in holders] == [[(1, 3)], [(2,)]]
    assert not lease
