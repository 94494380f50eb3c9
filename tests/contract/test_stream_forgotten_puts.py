"""Records of producers that have died are removed, and a late repetition is never stored twice."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from redis.exceptions import ConnectionError as Broken

from redrb import ExperienceStream
from redrb.connection import Client
from redrb.connection.transport import Pipeline
from redrb.errors import OutcomeUnknown, SendFailed
from redrb.stream.put import producer
from redrb.stream.sending import ExperienceSender
from tests.samples import numbered, numbers
from tests.scenes import pass_epochs

COUNTERS = 4
"""Fields of the hash `puts` that are no records, without the epoch."""


def records_of(stream: ExperienceStream) -> int:
    """Return how many producers the task has a record of."""
    store = stream._task.store
    fields: int = store.client.execute("HLEN", store.keys.puts)
    return fields - COUNTERS - store.client.execute("HEXISTS", store.keys.puts, "epoch")


def lose_reply(
    client: Client, monkeypatch: pytest.MonkeyPatch, stream: ExperienceStream, epochs: int
) -> list[Pipeline]:
    """Lose the reply to the next transaction of a put, after which epochs pass."""
    exchange, sent = client.exchange, []

    def lost_once(pipeline: Pipeline) -> Any:
        replies = exchange(pipeline)
        if pipeline.commands > 3 and not sent:
            sent.append(pipeline)
            pass_epochs(stream, epochs)
            raise Broken("Connection closed by server.")
        return replies

    monkeypatch.setattr(client, "exchange", lost_once)
    return sent


def test_a_record_is_removed_two_epochs_after_the_last_put(client, namespace):
    stream = ExperienceStream(client, "math", namespace=namespace)
    stream.put(numbered(1))
    pass_epochs(stream, 1)
    assert records_of(stream) == 1
    stream.put(numbered(2))
    pass_epochs(stream, 1)
    assert records_of(stream) == 1
    pass_epochs(stream, 1)
    assert records_of(stream) == 0


def test_a_producer_that_idled_for_days_puts_again(client, namespace):
    stream = ExperienceStream(client, "math", namespace=namespace)
    stream.put(numbered(1))
    pass_epochs(stream, 50)
    stream.put_many([[numbered(2)], [numbered(3)]])
    pass_epochs(stream, 50)
    with stream.writer() as writer:
        writer.put(numbered(4))
    with stream.take(4, timeout=0) as lease:
        assert numbers(lease) == [1, 2, 3, 4]
    assert records_of(stream) == 1


@pytest.mark.parametrize("epochs", [1, 2, 30])
@pytest.mark.parametrize("on_full", ["block", "drop_oldest"])
def test_a_repetition_is_never_stored_twice_however_late_it_comes(
    client, namespace, monkeypatch, on_full, epochs
):
    stream = ExperienceStream(client, "math", namespace=namespace, limit=1, on_full=on_full)
    sent: list[Pipeline] = []
    exchange = client.exchange
    monkeypatch.setattr(client, "exchange", lambda made: (sent.append(made), exchange(made))[1])
    stream.put(numbered(1))
    if on_full == "drop_oldest":
        stream.put(numbered(2))
    monkeypatch.setattr(client, "exchange", exchange)
    pass_epochs(stream, epochs)
    before = stream.stats()
    late = exchange(sent[-1])[-1]
    assert msgpack.unpackb(late[-1])["outcome"] == ("again" if epochs < 2 else "forgotten")
    assert stream.stats() == before


def test_a_put_of_which_nobody_knows_whether_it_is_stored_is_not_repeated(
    client, namespace, monkeypatch
):
    stream = ExperienceStream(client, "math", namespace=namespace)
    sent = lose_reply(client, monkeypatch, stream, epochs=2)
    with pytest.raises(OutcomeUnknown, match="nobody knows whether 1 group is") as caught:
        stream.put(numbered(1))
    assert sent
    assert (caught.value.groups, caught.value.stored) == (1, 0)
    stream.put(numbered(2))
    with stream.take(2, timeout=0) as lease:
        assert numbers(lease) == [1, 2]


def test_a_repetition_within_two_epochs_is_recognized(client, namespace, monkeypatch):
    stream = ExperienceStream(client, "math", namespace=namespace)
    lose_reply(client, monkeypatch, stream, epochs=1)
    assert stream.put(numbered(1)) == (1,)
    assert stream.stats().stored == 1


def test_a_writer_and_a_sender_give_such_a_put_up_and_go_on(client, namespace, monkeypatch):
    stream = ExperienceStream(client, "math", namespace=namespace)
    begin, lost = client.begin, []

    def lost_once(pipeline):
        sent = begin(pipeline)
        if not lost:
            lost.append(sent.replies())
            pass_epochs(stream, 2)
            raise Broken("Connection closed by server.")
        return sent

    monkeypatch.setattr(client, "begin", lost_once)
    writer = stream.writer()
    writer.put(numbered(1))
    with pytest.raises(OutcomeUnknown):
        writer.flush()
    writer.put(numbered(2))
    writer.flush()
    lost.clear()
    with ExperienceSender(stream) as sender:
        sender.send(numbered(3))
        with pytest.raises(SendFailed) as caught:
            sender.flush(timeout=10)
        assert isinstance(caught.value.__cause__, OutcomeUnknown)
        sender.send(numbered(4))
    with stream.take(4, timeout=0) as lease:
        assert numbers(lease) == [1, 2, 3, 4]


def test_a_connection_that_broke_while_a_maker_idled_costs_no_put(client, namespace, monkeypatch):
    """The epoch is read before the put gets its number, so that its repetition is recognized."""
    stream = ExperienceStream(client, "math", namespace=namespace)
    stream.put(numbered(1))
    pass_epochs(stream, 9)
    monkeypatch.setattr(producer, "FRESH_S", 0.0)
    exchange, broken = client.exchange, []

    def broken_once(pipeline):
        if not broken:
            broken.append(pipeline)
            raise Broken("Connection reset by peer.")
        return exchange(pipeline)

    monkeypatch.setattr(client, "exchange", broken_once)
    stream.put(numbered(2))
    assert stream.stats().stored == 2


def test_a_clock_that_was_set_back_does_not_stop_the_epochs(client, namespace):
    stream = ExperienceStream(client, "math", namespace=namespace)
    stream.put(numbered(1))
    store = stream._task.store
    client.execute("HSET", store.keys.task, "epoch_ms", 2**52)
    stream._task.reopen()
    pass_epochs(stream, 2)
    assert records_of(stream) == 0


def test_a_resumed_task_has_no_producers_and_counts_epochs_anew(client, namespace, tmp_path):
    stream = ExperienceStream(client, "math", namespace=namespace)
    pass_epochs(stream, 3)
    stream.put(numbered(1))
    stream.save(tmp_path / "saved")
    back = ExperienceStream(client, "back", namespace=namespace)
    back.resume(tmp_path / "saved")
    assert records_of(back) == 0
    back.put(numbered(2))
    assert records_of(back) == 1
    pass_epochs(back, 2)
    assert records_of(back) == 0
    back.put(numbered(3))
    assert back.stats().stored == 3
