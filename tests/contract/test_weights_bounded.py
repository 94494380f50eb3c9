"""The cost of a commit does not grow with the versions that are kept."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import pytest
import torch

import redrb
from redrb.connection import Client
from redrb.weights.inspection.listing import versions_of
from tests.scenes import commands_run

FEW, MANY = 20, 200
MOST_US = 3000
"""Of the median script: 2 ms, and half as much again on a busy machine."""


@pytest.fixture
def client(real_url):
    with redrb.connect(real_url) as client:
        yield client


def publisher(client: Client, namespace: str, keep: int, **options: int) -> Callable[[], int]:
    """Return a call that publishes the next version, and returns the commands that this ran."""
    writer = redrb.WeightPublisher(client, "policy", namespace=namespace, keep=keep, **options)
    state = {"a": torch.zeros(4000)}

    def publish() -> int:
        state["a"][0] += 1
        before = commands_run(client)
        writer.publish(state)
        return commands_run(client) - before

    return publish


@pytest.mark.parametrize(("anchor_every", "max_bytes"), [(5, 10**12), (1000, 0)])
def test_a_commit_costs_the_same_with_many_kept_versions(
    client, namespace, anchor_every, max_bytes
):
    costs = {}
    for keep in (FEW, MANY):
        options = {"anchor_every": anchor_every, **({"max_bytes": max_bytes} if max_bytes else {})}
        publish = publisher(client, f"{namespace}-{keep}", keep, **options)
        for _ in range(keep):
            publish()
        costs[keep] = max(publish() for _ in range(15))
        kept = len(versions_of(client, "policy", f"{namespace}-{keep}"))
        assert kept >= keep
    assert costs[MANY] <= costs[FEW] + 5, costs


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("keep", [1000, 3000])
def test_no_script_takes_long_with_thousands_of_kept_versions(client, namespace, keep):
    client.execute("CONFIG", "SET", "slowlog-max-len", 1000)
    publish = publisher(client, namespace, keep, anchor_every=keep)
    for _ in range(keep):
        publish()
    spent = []
    client.execute("CONFIG", "SET", "slowlog-log-slower-than", 0)
    for _ in range(30):
        client.execute("SLOWLOG", "RESET")
        publish()
        entries = client.execute("SLOWLOG", "GET", -1)
        spent.append(max(entry[2] for entry in entries if entry[3][0] == b"EVALSHA"))
    client.execute("CONFIG", "SET", "slowlog-log-slower-than", 10_000)
    print(f"keep={keep}: longest script of a version, median {median(spent)}, most {max(spent)} us")
    assert median(spent) <= MOST_US
