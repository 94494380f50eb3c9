"""Makers of parts that are killed: the group is there once, and its parts outlive them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import redrb
from redrb import ExperienceStream
from redrb.errors import StoreUnavailable
from tests import warm
from tests.samples import numbered, numbers

ROOT = Path(__file__).parents[2]

MAKER = """
import sys
import redrb
from redrb.stream.put.producer import Producer
from tests.samples import numbered

def stop_before_the_group_is_put(*_):
    print("stored", flush=True)
    sys.stdin.read()

Producer.put = stop_before_the_group_is_put
url, namespace, *indices = sys.argv[1:]
stream = redrb.ExperienceStream(redrb.connect(url), "math", namespace=namespace)
for index in map(int, indices):
    stream.put_part("a", numbered(index), index=index, of=4, policy_version=index)
stop_before_the_group_is_put()
"""


def killed_maker(url: str, namespace: str, *indices: int) -> None:
    """Put parts from a process that is killed then: with the last part before the group is put."""
    maker = warm.Popen(
        [sys.executable, "-c", MAKER, url, namespace, *map(str, indices)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert maker.stdout.readline() == "stored\n"
    finally:
        maker.send_signal(signal.SIGKILL)
        maker.communicate(timeout=30)


def test_a_group_whose_makers_are_killed_is_there_once(real_url: str, namespace: str) -> None:
    with redrb.connect(real_url) as client:
        stream = ExperienceStream(client, "math", namespace=namespace, lease_ms=300)
        stream.join_group()
        killed_maker(real_url, namespace, 3, 0)
        killed_maker(real_url, namespace, 0, 1, 2)
        due = f"{stream._task.store.keys.prefix}part_due"
        client.execute("ZADD", due, "XX", 1, "a")  # the grace of the makers is over
        lease = stream.take(1, timeout=30)  # this consumer's heartbeat puts the group
        assert numbers(lease) == [0, 1, 2, 3]
        assert [item.policy_version for item in lease.items()] == [0, 1, 2, 3]
        lease.ack()
        assert stream.put_part("a", numbered(2), index=2, of=4) == 1
        stats = stream.stats()
        assert (stats.parts.completed, stats.parts.groups, stats.parts.repeated) == (1, 0, 1)
        assert (stats.ledger.put, stats.ledger.acked) == (1, 1)
        stream.clear()
        stream.close()


def test_no_part_returns_before_replicas_have_it(real_url: str, namespace: str) -> None:
    with (
        redrb.connect(real_url, retry_s=0.1) as client,
        ExperienceStream(client, "math", namespace=namespace) as stream,
        ExperienceStream(client, "math", namespace=namespace, min_replicas=1) as careful,
    ):
        with pytest.raises(StoreUnavailable, match="only 0 of 1 replicas"):
            careful.put_part("a", numbered(0), index=0, of=2)
        assert stream.put_part("a", numbered(1), index=1, of=2) is not None
        with pytest.raises(StoreUnavailable, match="only 0 of 1 replicas"):
            careful.put_part("a", numbered(0), index=0, of=2)  # the group is that of another put
        stream.clear()
