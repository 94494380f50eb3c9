"""Groups are put, taken as batches, and their leases end."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
import torch

import redrb
from redrb import BatchTimeout, ExperienceStream, LeaseLost, make_experience_batch
from redrb.errors import ConfigError, RecordError
from tests.audit import audit, kill_consumer
from tests.samples import assert_same, numbered, numbers, random_item


@pytest.fixture
def stream(client, namespace):
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        yield stream
        audit(stream)
        assert stream.stats().ledger.balanced


def test_a_list_is_one_group_and_a_sample_a_group_of_its_own(stream):
    ids = stream.put([numbered(1), numbered(2), numbered(3)]) + stream.put(numbered(4))
    assert len(ids) == 2
    assert len(stream) == 2
    lease = stream.take(2, timeout=0)
    assert lease.ids == ids
    assert [numbers(group) for group in lease.groups()] == [[1, 2, 3], [4]]
    assert lease.samples == 4
    assert stream.stats().samples_put == 4
    assert lease.nbytes == stream.stats().bytes_put
    lease.ack()
    assert stream.stats().samples_acked == 4


def test_a_batch_knows_its_groups_and_the_lengths_of_ragged_tensors(stream):
    def seeing(number, patches):
        pixels = torch.full((patches, 2), float(number))
        return numbered(number, tensors={"pixels": pixels, "grid": torch.tensor([[1, patches]])})

    groups = [[seeing(1, 2), seeing(2, 1)], [seeing(3, 3)], [seeing(4, 1), seeing(5, 1)]]
    stream.put_many(groups)
    lease = stream.take(3, timeout=0)
    batch = lease.batch()
    assert batch.group_index.tolist() == [0, 0, 1, 2, 2]
    assert batch.tensors["pixels_lengths"].tolist() == [2, 1, 3, 1, 1]
    assert list(batch.tensors) == ["grid", "pixels", "pixels_lengths"]  # grids are alike
    lease.ack()
    stream.put(batch)  # each row is a group, without padding
    again = stream.take(5, timeout=0)
    for item, sample in zip(again.items(), [own for group in groups for own in group], strict=True):
        assert item.tensors.keys() == sample.tensors.keys()
        assert torch.equal(item.tensors["pixels"], sample.tensors["pixels"])
    again.ack()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_is_what_make_experience_batch_makes(stream, side):
    dice = random.Random(7)
    items = [random_item(dice) for _ in range(12)]
    stream.put_many([items[:1], items[1:5], items[5:]])
    with stream.take(3, timeout=0) as lease:
        got, expected = lease.batch(side=side), make_experience_batch(items, side=side)
        assert lease.policy_versions == [item.policy_version for item in items]
    assert_same(got, expected)
    assert got.padding_side == side


def test_items_come_back_as_they_were(stream):
    items = [random_item(random.Random(n)) for n in range(4)]
    for n in (0, 1, 3):  # the aborted one may lack fields
        items[n].tensors["logits"] = torch.randn(3, 5, dtype=torch.float64)
    items[1].group_id = "prompt 1"
    items[2].status = redrb.Status.ABORTED
    for item in items:
        stream.put(item)
    with pytest.raises(BatchTimeout, match=r"1 has another status\. Take with their"):
        stream.take(4, timeout=0)
    with stream.take(3, timeout=0) as lease:
        for got, expected in zip(lease.items(), [*items[:2], items[3]], strict=True):
            assert_same(got, expected)
    with stream.take(1, timeout=0, status=redrb.Status.ABORTED) as lease:
        assert_same(lease.items()[0], items[2])


def test_a_take_is_full_or_takes_nothing(stream):
    stream.put_many([[numbered(n)] for n in range(3)])
    with pytest.raises(BatchTimeout) as caught:
        stream.take(4, timeout=0)
    error = caught.value
    assert (error.task, error.wanted, error.available) == ("math", 4, 3)
    assert error.waited_s < 9  # the client's time is ten seconds
    assert isinstance(error, TimeoutError)
    ledger = stream.stats().ledger
    assert (ledger.waiting, ledger.leased) == (3, 0)
    assert numbers(stream.take(3, timeout=0)) == [0, 1, 2]


def test_a_timeout_has_the_time_it_waited(stream):
    with pytest.raises(BatchTimeout) as caught:
        stream.take(1, timeout=0.15)
    assert 0.15 <= caught.value.waited_s < 9
    assert "0 of 1 group was waiting" in str(caught.value)
    assert "'math'" in str(caught.value)


def test_at_least_takes_fewer_only_when_the_time_is_up(stream):
    stream.put_many([[numbered(n)] for n in range(5)])
    assert numbers(stream.take(2, timeout=5, at_least=1)) == [0, 1]
    assert numbers(stream.take(4, timeout=0.1, at_least=2)) == [2, 3, 4]
    with pytest.raises(BatchTimeout) as caught:
        stream.take(4, timeout=0, at_least=1)
    assert caught.value.wanted == 1


def test_ack_deletes_and_release_and_reject_do_not_count_as_trained(stream):
    stream.put_many([[numbered(n)] for n in range(6)])
    stream.take(2, timeout=0).ack()
    stream.take(2, timeout=0).reject("nan loss")
    stream.take(2, timeout=0).release()
    stats = stream.stats()
    assert stats.ledger.as_dict() == {
        **dict.fromkeys(("expired", "filtered", "evicted", "leased"), 0),
        "put": 6,
        "acked": 2,
        "dead": 2,
        "waiting": 2,
    }
    assert (stats.stored, stats.samples_acked, stats.returned) == (2, 2, 2)
    letters = stream.dead_letters()
    assert [letter.id for letter in letters] == [4, 3]
    assert {letter.reason for letter in letters} == {"nan loss"}
    assert {letter.group for letter in letters} == {"default"}
    assert [numbers(letter.items or []) for letter in letters] == [[3], [2]]
    assert [letter.id for letter in stream.dead_letters(1)] == [4]


def test_parts_of_a_lease_end_by_their_ids(stream):
    stream.put_many([[numbered(n)] for n in range(1, 7)])
    lease = stream.take(5, timeout=0)
    lease.ack([])
    assert lease.ids == (1, 2, 3, 4, 5)
    lease.ack([2, 4, 4])
    assert lease.ids == (1, 3, 5)
    assert stream.stats().samples_acked == 2
    assert numbers(lease.batch() and lease) == [1, 3, 5]
    lease.reject("too long", [3])
    lease.release([1])
    assert lease.ids == (5,)
    assert len(lease) == 1
    audit(stream)
    with pytest.raises(ConfigError, match="not in this lease"):
        lease.ack([1, 5])
    lease.ack()
    ledger = stream.stats().ledger
    assert (ledger.acked, ledger.dead, ledger.leased, ledger.waiting) == (3, 1, 0, 2)
    assert numbers(stream.take(2, timeout=0)) == [1, 6]


@pytest.mark.parametrize("end", ["ack", "release", "reject", "batch", "groups"])
def test_a_lease_that_ended_says_so(stream, end):
    stream.put(numbered(1))
    lease = stream.take(1, timeout=0)
    lease.ack()
    late: dict[str, Callable[[], object]] = {
        "ack": lease.ack,
        "release": lease.release,
        "reject": lambda: lease.reject("late"),
        "batch": lease.batch,
        "groups": lease.groups,
    }
    with pytest.raises(LeaseLost, match="ended already"):
        late[end]()


def test_a_dead_letter_of_a_rejection_says_why_where_and_when(stream):
    stream.put_many([[numbered(1)], [numbered(2)]])
    with pytest.raises(ZeroDivisionError), stream.take(2, timeout=0):
        raise ZeroDivisionError
    before = datetime.now(UTC)
    lease = stream.take(2, timeout=0)
    lease.reject(OutOfTune("no A\ud800" + "x" * 5000), lease.ids[:1])
    lease.reject("nan loss")
    plain, letter = stream.dead_letters()
    assert (letter.exception, letter.reason) == (f"{__name__}.OutOfTune", letter.message)
    assert letter.message.startswith("no A?x")
    assert len(letter.message) == 2000
    assert (plain.exception, plain.message, plain.reason) == (None, "", "nan loss")
    for each in (plain, letter):
        assert (each.host, each.pid) == (socket.gethostname()[:64], os.getpid())
        assert each.consumer == stream.consumer
        assert abs((each.time - before).total_seconds()) < 60
        assert (each.deliveries, each.failed_deliveries) == (2, 1)
    stream.put(numbered(3))
    with stream.take(1) as lease, pytest.raises(ConfigError, match="str or an exception"):
        lease.reject(7)


class OutOfTune(Exception):
    """An error of a training step."""


def test_an_exception_in_a_block_requeues_and_counts_a_failed_delivery(stream):
    stream.put(numbered(1))
    for number in range(5):
        with pytest.raises(ZeroDivisionError), stream.take(1, timeout=0):
            raise ZeroDivisionError(f"step {number}")
        audit(stream)
    (letter,) = stream.dead_letters()
    assert (letter.exception, letter.message) == ("ZeroDivisionError", "step 4")
    assert (letter.pid, letter.deliveries) == (os.getpid(), 5)
    assert letter.failed_deliveries == 5
    assert letter.reason == "delivered 5 times without acknowledgement"
    assert stream.stats().ledger.dead == 1


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_a_block_requeues_unharmed(stream, interrupt):
    stream.put(numbered(1))
    for _ in range(6):
        with pytest.raises(interrupt), stream.take(1, timeout=0):
            raise interrupt
    assert stream.stats().ledger.waiting == 1
    assert stream.dead_letters() == []


def test_a_lost_lease_inside_the_block_of_another_lease_requeues_that_one(stream):
    stream.put_many([[numbered(n)] for n in range(2)])
    ended = stream.take(1, timeout=0)
    ended.ack()
    with pytest.raises(LeaseLost), stream.take(1, timeout=0):
        ended.ack()
    ledger = stream.stats().ledger
    assert (ledger.acked, ledger.leased, ledger.waiting) == (1, 0, 1)


def test_a_lease_describes_its_groups_without_decoding_them(stream, monkeypatch):
    one = numbered(1, group_id="a", tags={"source": "math"}, status=redrb.Status.FILTERED)
    two = numbered(2, group_id="a", policy_version=4)
    stream.put([one, two], status=redrb.Status.COMPLETED, policy_version=3)
    stream.put(numbered(3))
    lease = stream.take(2, timeout=0)
    with monkeypatch.context() as patch:
        patch.setattr("redrb.stream.take.lease.decode_items", None)
        assert lease.group_ids == ["a", None]
        assert lease.policy_versions == [3, 4, None]
        assert lease.statuses == ["filtered", "completed", "completed"]
        assert lease.tags == [{"source": "math"}, {}, {}]
        lease.tags[0]["source"] = "code"
    assert lease.items()[0].tags == {"source": "math"}
    lease.release(lease.ids[:1])
    assert (lease.group_ids, lease.statuses, lease.tags) == ([None], ["completed"], [{}])
    lease.ack()
    assert lease.group_ids == []


def test_before_anyone_joins_everything_waits(stream):
    stream.put_many([[numbered(n)] for n in range(3)])
    ledger = stream.stats().ledger
    assert (ledger.put, ledger.waiting) == (3, 3)
    with pytest.raises(BatchTimeout):
        stream.take(4, timeout=0)
    assert stream.stats().ledger == ledger


def test_the_lease_before_is_acknowledged_even_when_the_take_times_out(stream):
    stream.put_many([[numbered(n)] for n in range(2)])
    lease = stream.take(2, timeout=0)
    with pytest.raises(BatchTimeout):
        stream.take(1, timeout=0, ack=lease)
    assert len(lease) == 0
    assert stream.stats().ledger.acked == 2
    with pytest.raises(LeaseLost):
        lease.ack()


def test_a_lost_lease_before_is_an_error_and_nothing_is_taken(open_stream):
    slow, other = open_stream(), open_stream()
    slow.put_many([[numbered(n)] for n in range(3)])
    lease = slow.take(1, timeout=0)
    with pytest.raises(ConfigError, match="same stream object"):
        other.take(1, timeout=0, ack=lease)
    kill_consumer(slow)
    assert numbers(other.take(1, timeout=0)) == [0]
    with pytest.raises(LeaseLost):
        slow.take(1, timeout=0, ack=lease)
    ledger = slow.stats().ledger
    assert (ledger.acked, ledger.leased, ledger.waiting) == (0, 1, 2)


def narrow(number: int) -> redrb.BufferItem:
    return numbered(number, action_log_probs=torch.zeros(2, dtype=torch.float16))


def test_only_the_group_that_does_not_fit_goes_to_the_dead_letters(open_stream):
    """Puts without the check of fields do not refuse other dtypes: takes find them then."""
    stream = open_stream(checks=["values", "versions"])
    stream.put_many([[numbered(0)], [narrow(1)], [numbered(2)], [numbered(3)]])
    with stream.take(2, timeout=0) as lease:
        assert numbers(lease) == [0, 1]  # they can be read one by one
        lease.release()
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
    assert stream.stats().ledger.acked == 3
