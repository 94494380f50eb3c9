"""Several consumer groups on one task: each sees every group of samples."""

from __future__ import annotations

import pytest

from redrb import BatchTimeout
from tests.conftest import Opener
from tests.samples import numbered, numbers


def test_each_group_sees_every_entry_and_the_last_one_deletes_it(open_stream: Opener) -> None:
    actor, critic = open_stream(group="actor"), open_stream(group="critic")
    actor.join_group()
    critic.join_group()
    actor.put_many([[numbered(n)] for n in range(4)])
    actor.take(4, timeout=0).ack()
    assert (actor.stats().stored, len(actor), len(critic)) == (4, 0, 4)
    lease = critic.take(3, timeout=0)
    assert numbers(lease) == [0, 1, 2]
    lease.ack()
    assert critic.stats().stored == 1
    assert actor.stats().ledger.acked == 4
    assert critic.stats().ledger.acked == 3


def test_a_group_that_joins_late_sees_what_is_stored(open_stream: Opener) -> None:
    actor = open_stream(group="actor")
    actor.put_many([[numbered(n)] for n in range(4)])
    actor.take(2, timeout=0).ack()
    critic = open_stream(group="critic")
    critic.join_group()
    critic.join_group()
    assert critic.stats().ledger.put == 2
    actor.take(2, timeout=0).ack()
    assert critic.stats().stored == 2
    assert numbers(critic.take(2, timeout=0)) == [2, 3]


def test_a_consumer_group_also_gets_groups_that_another_one_leases_or_released(
    open_stream: Opener,
) -> None:
    actor, critic = open_stream(group="actor"), open_stream(group="critic")
    actor.put_many([[numbered(n)] for n in range(4)])
    held = actor.take(2, timeout=0)
    actor.take(1, timeout=0).release()
    lease = critic.take(4, timeout=0)
    assert numbers(lease) == [0, 1, 2, 3]
    lease.ack()
    assert actor.stats().stored == 4
    held.ack()
    assert actor.stats().stored == 2


def test_rejecting_in_one_group_leaves_the_entry_to_the_other(open_stream: Opener) -> None:
    actor, critic = open_stream(group="actor"), open_stream(group="critic")
    critic.join_group()
    actor.put(numbered(1))
    actor.take(1, timeout=0).reject("nan loss")
    assert actor.stats().ledger.dead == 1
    assert numbers(critic.take(1, timeout=0)) == [1]
    assert [letter.group for letter in critic.dead_letters()] == ["actor"]


def test_dropping_a_consumer_group_deletes_the_groups_that_only_it_needed(
    open_stream: Opener,
) -> None:
    actor, critic = open_stream(group="actor"), open_stream(group="critic")
    critic.join_group()
    actor.put_many([[numbered(n)] for n in range(6)])
    actor.take(4, timeout=0).ack()
    critic.take(1, timeout=0)
    critic.take(1, timeout=0).release()
    assert critic.drop_group() == 4
    assert actor.stats().stored == 2
    assert critic.drop_group() == 0
    assert numbers(actor.take(2, timeout=0)) == [4, 5]


def test_dropping_the_only_group_keeps_the_entries(open_stream: Opener) -> None:
    actor = open_stream(group="actor")
    actor.put_many([[numbered(n)] for n in range(3)])
    actor.take(1, timeout=0).ack()
    actor.take(1, timeout=0)
    assert actor.drop_group() == 0
    assert actor.stats().stored == 2
    assert numbers(open_stream(group="critic").take(2, timeout=0)) == [1, 2]


def test_before_anyone_joins_everything_waits(open_stream: Opener) -> None:
    actor = open_stream(group="actor")
    actor.put_many([[numbered(n)] for n in range(3)])
    ledger = actor.stats().ledger
    assert (ledger.put, ledger.waiting) == (3, 3)
    with pytest.raises(BatchTimeout):
        actor.take(4, timeout=0)
    assert actor.stats().ledger == ledger
