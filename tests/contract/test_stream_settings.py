"""A task's settings, its independence of other tasks, and `clear`."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from redrb import BatchTimeout, ExperienceStream, LeaseLost, TaskMismatch
from redrb.connection import Client
from redrb.errors import ConfigError
from tests.audit import audit
from tests.samples import numbered, numbers


def test_a_setting_that_is_left_out_is_the_stored_one(client: Client, namespace: str) -> None:
    with (
        ExperienceStream(client, "math", namespace=namespace, limit=2),
        ExperienceStream(client, "math", namespace=namespace, on_full="error") as later,
    ):
        assert later.stats().limit == 2
        later.put_many([[numbered(1)], [numbered(2)]])
        with pytest.raises(ConfigError, match="at most 2 groups"):
            later.take(3, timeout=0)


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ({"limit": 4}, {"limit": 5}),
        ({"limit": 4}, {"limit": 0}),
        ({"max_bytes": 4000}, {"max_bytes": 5}),
        ({"max_deliveries": 4}, {"max_deliveries": 1}),
    ],
)
def test_other_settings_than_the_stored_ones_are_refused(
    client: Client, namespace: str, stored: dict[str, Any], asked: dict[str, Any]
) -> None:
    with ExperienceStream(client, "math", namespace=namespace, **stored):
        with pytest.raises(TaskMismatch) as caught:
            ExperienceStream(client, "math", namespace=namespace, **asked)
        (name,) = stored
        assert caught.value.task == "math"
        assert caught.value.differences == {name: (str(stored[name]), str(asked[name]))}
        ExperienceStream(client, "math", namespace=namespace, **stored).close()


def test_tasks_and_namespaces_do_not_see_each_other(client: Client, namespace: str) -> None:
    places = [(namespace, "math"), (namespace, "code"), (f"{namespace}-2", "math")]
    streams = [ExperienceStream(client, task, namespace=where) for where, task in places]
    for number, stream in enumerate(streams):
        stream.put_many([[numbered(number)]] * (number + 1))
    assert [len(stream) for stream in streams] == [1, 2, 3]
    for number, stream in enumerate(streams):
        assert set(numbers(stream.take(number + 1, timeout=0))) == {number}
    assert streams[0].clear() == 1
    assert [stream.stats().ledger.leased for stream in streams] == [0, 2, 3]
    for stream in streams:
        stream.close()


def test_clear_deletes_everything_of_the_task(client: Client, namespace: str) -> None:
    with ExperienceStream(client, "math", namespace=namespace, max_bytes=10**6) as stream:
        stream.put_many([[numbered(n)] for n in range(5)])
        lease = stream.take(2, timeout=0)
        stream.take(1, timeout=0).reject("bad")
        assert stream.clear() == 4
        left = client.execute("KEYS", f"redrb:{{{namespace}:math}}:*")
        [removed] = [key for key in left if b":wake:" not in key]  # who has removed it
        assert removed.endswith(b":removed")
        assert 0 < client.execute("PTTL", removed) <= 3_600_000
        assert len(stream) == 0
        assert stream.stats().ledger.put == 0
        assert stream.dead_letters() == []
        with pytest.raises(LeaseLost):
            lease.ack()


def test_streams_opened_before_a_clear_go_on_with_their_settings(
    client: Client, namespace: str
) -> None:
    with (
        ExperienceStream(client, "math", namespace=namespace, limit=7) as maker,
        ExperienceStream(client, "math", namespace=namespace, limit=7) as trainer,
    ):
        maker.put(numbered(1))
        trainer.take(1, timeout=0)
        trainer.clear()
        assert maker.put(numbered(2)) == (1,)
        assert maker.stats().limit == 7
        assert numbers(trainer.take(1, timeout=0)) == [2]
        audit(trainer)
        trainer.clear()
        with pytest.raises(BatchTimeout):
            trainer.take(1, timeout=0)
        trainer.clear()
        trainer.join_group()
        assert trainer.stats().limit == 7
        audit(trainer)


def test_a_waiting_take_survives_a_clear(client: Client, namespace: str) -> None:
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        stream.put(numbered(1))
        got: list[int] = []
        thread = threading.Thread(target=lambda: got.extend(numbers(stream.take(2, timeout=20))))
        thread.start()
        while stream.stats().consumers_waiting == 0:
            pass
        stream.clear()
        stream.put_many([[numbered(2)], [numbered(3)]])
        thread.join(10)
        assert got == [2, 3]
        audit(stream)
