"""take(ack=lease): acknowledge the batch before and take the next in one round trip."""

from __future__ import annotations

import pytest

from redrb import BatchTimeout, ConfigError, ExperienceStream, LeaseLost
from redrb.connection import Client
from tests.audit import audit, kill_consumer
from tests.samples import numbered, numbers


def filled(client: Client, namespace: str, count: int) -> ExperienceStream:
    stream = ExperienceStream(client, "math", namespace=namespace)
    stream.put_many([[numbered(n)] for n in range(count)])
    return stream


def test_the_lease_before_is_acknowledged(client: Client, namespace: str) -> None:
    stream = filled(client, namespace, 6)
    lease, seen = None, []
    for _ in range(3):
        lease = stream.take(2, timeout=0, ack=lease)
        seen += numbers(lease)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert stream.stats().ledger.acked == 4
    assert lease is not None
    lease.ack()
    assert stream.stats().ledger.acked == 6
    assert stream.stats().samples_acked == 6
    audit(stream)


def test_it_is_acknowledged_even_when_the_take_times_out(client: Client, namespace: str) -> None:
    stream = filled(client, namespace, 2)
    lease = stream.take(2, timeout=0)
    with pytest.raises(BatchTimeout):
        stream.take(1, timeout=0, ack=lease)
    assert len(lease) == 0
    assert stream.stats().ledger.acked == 2
    with pytest.raises(LeaseLost):
        lease.ack()


def test_only_groups_that_are_left_are_acknowledged(client: Client, namespace: str) -> None:
    stream = filled(client, namespace, 4)
    lease = stream.take(2, timeout=0)
    lease.reject("odd", [lease.ids[0]])
    following = stream.take(2, timeout=0, ack=lease)
    assert numbers(following) == [2, 3]
    ledger = stream.stats().ledger
    assert (ledger.acked, ledger.dead) == (1, 1)
    following = stream.take(1, timeout=0, at_least=1) if len(stream) else following
    following.ack()
    audit(stream)


def test_a_lost_lease_is_an_error_and_nothing_is_taken(client: Client, namespace: str) -> None:
    slow, other = filled(client, namespace, 3), filled(client, namespace, 0)
    lease = slow.take(1, timeout=0)
    kill_consumer(slow)
    assert numbers(other.take(1, timeout=0)) == [0]
    with pytest.raises(LeaseLost):
        slow.take(1, timeout=0, ack=lease)
    ledger = slow.stats().ledger
    assert (ledger.acked, ledger.leased, ledger.waiting) == (0, 1, 2)
    audit(slow)


def test_a_lease_of_another_stream_object_is_refused(client: Client, namespace: str) -> None:
    first, second = filled(client, namespace, 2), filled(client, namespace, 0)
    lease = first.take(1, timeout=0)
    with pytest.raises(ConfigError, match="same stream object"):
        second.take(1, timeout=0, ack=lease)
    lease.ack()
