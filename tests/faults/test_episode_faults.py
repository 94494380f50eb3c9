"""A maker of episodes that is killed: no group is lost, doubled or torn, and others go on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import redrb
from redrb.connection import Client
from redrb.train.engines import Generation, Trajectory
from redrb.train.episodes import EpisodeMaker
from tests import warm
from tests.engine_server import EngineServer
from tests.faults.episode_maker import (
    GROUP_SIZE,
    GROUPS,
    LENGTH,
    engine_of,
    episode,
    opened,
    prompts,
)
from tests.servers import programs

RIGHTS = 12
"""Groups that may be begun at version 0: those of two versions."""


THROUGH = 14
"""Completions before those that stop midway: more than three groups, less than all rights."""


def addresses_of(process: subprocess.Popen[bytes]) -> set[str]:
    """Stop a process, and return the addresses of its connections."""
    process.send_signal(signal.SIGSTOP)
    found = psutil.Process(process.pid).net_connections("tcp")
    return {f"addr={each.laddr.ip}:{each.laddr.port} " for each in found}


def until_gone(client: Client, addresses: set[str]) -> None:
    """Wait until Redis has ended the connections from these addresses."""
    deadline = time.monotonic() + 60
    while any(each in client.execute("CLIENT", "LIST").decode() for each in addresses):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("real_url", list(programs())[:1], indirect=True)
def test_a_killed_maker_of_episodes(real_url: str, namespace: str) -> None:
    with EngineServer() as server, opened(real_url, namespace) as stream:
        stream.join_group()
        stream.advance(0)
        begun = Trajectory([1, 2])
        begun.sampled(Generation([4, 5], [-1.0, -2.0], [0, 0], "abort"))
        prompt = {"input_ids": [1, 2], "number": -1}
        with stream.admit(1) as right:
            stream.put([begun.item(extras={"prompt": prompt}) for _ in range(2)], admission=right)
        server.stands_from = THROUGH
        maker = warm.Popen(
            [sys.executable, "-m", "tests.faults.episode_maker"]
            + [real_url, namespace, server.url],
            cwd=Path(__file__).parents[2],
        )
        try:
            with stream.take(3, timeout=60) as lease:  # three of its groups are there
                lease.release()
            server.until_standing(1)  # it generates further ones
            assert (stream.count("aborted"), stream.stats().ledger.leased) == (0, 1)
        finally:
            addresses = addresses_of(maker)
            maker.kill()
            maker.wait(30)
        with redrb.connect(real_url) as client:
            until_gone(client, addresses)  # Redis has read all that it sent
        stored = stream.count()
        server.stands_from = None
        # these need all the rights that the killed maker had not used
        missing = RIGHTS - 1 - stored
        assert missing >= GROUPS - 1
        second = EpisodeMaker(stream, episode, engine_of(server.url), group_size=GROUP_SIZE)
        second.run(prompts(1000, missing))
        deadline = time.monotonic() + 60
        while stream.count() < RIGHTS:  # the aborted group waits when the lease on it is over
            assert time.monotonic() < deadline
            EpisodeMaker(stream, episode, engine_of(server.url)).run([])
        with stream.take(RIGHTS, timeout=20) as lease:
            groups = lease.groups()
        stats = stream.stats()
    assert [len(group) for group in groups] == [GROUP_SIZE] * RIGHTS
    numbers = [{item.extras["number"] for item in group} for group in groups]
    assert all(len(each) == 1 for each in numbers)
    made = sorted(number for each in numbers for number in each)
    assert made[0] == -1
    assert len(set(made[1 : 1 + stored])) == stored
    assert made[1 + stored :] == list(range(1000, 1000 + missing))
    for item in (item for group in groups for item in group):
        assert len(item.sequences) == 2 + LENGTH
        if item.extras["number"] == -1:
            assert item.sequences.tolist()[:4] == [1, 2, 4, 5]
    assert stats.ledger.balanced
    assert stats.admission.held == 0
