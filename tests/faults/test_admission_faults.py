"""Makers that are killed while they hold rights: the rights return, and waiting makers go on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import redrb
from redrb import ExperienceStream
from tests import warm
from tests.samples import numbered, numbers

ROOT = Path(__file__).parents[2]
LEASE_MS = 1000

MAKER = """
import sys, redrb
url, namespace, count = sys.argv[1:]
stream = redrb.ExperienceStream(redrb.connect(url), "math", namespace=namespace, lease_ms=1000)
right = stream.admit(int(count), timeout=60)
print("holds", right.count, flush=True)
sys.stdin.read()
"""


def start_maker(url: str, namespace: str, count: int) -> subprocess.Popen[str]:
    """Start a process that holds rights until it ends."""
    return warm.Popen(
        [sys.executable, "-c", MAKER, url, namespace, str(count)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(maker: subprocess.Popen[str]) -> str:
    return maker.stdout.readline().strip()


def end(maker: subprocess.Popen[str], how: int) -> None:
    maker.send_signal(how)
    maker.communicate(timeout=30)


def test_the_rights_of_killed_makers_return_and_waiting_makers_go_on(real_url, namespace):
    with redrb.connect(real_url) as client:
        stream = ExperienceStream(
            client,
            "math",
            namespace=namespace,
            lease_ms=LEASE_MS,
            order="admission",
            max_staleness=0,
            groups_per_version=4,
        )
        stream.advance(1)
        makers = [start_maker(real_url, namespace, 2) for _ in range(2)]
        try:
            assert [said(maker) for maker in makers] == ["holds 2", "holds 2"]
            with ThreadPoolExecutor(2) as pool:
                waiting = [pool.submit(stream.admit, 2, timeout=60) for _ in range(2)]
                for maker in makers:
                    end(maker, signal.SIGKILL)
                rights = [each.result(60) for each in waiting]
        finally:
            for maker in makers:
                end(maker, signal.SIGKILL)
        for number, right in enumerate(rights):
            with right:
                groups = [[numbered(2 * number)], [numbered(2 * number + 1)]]
                stream.put_many(groups, policy_version=1, admission=right)
        assert sorted(numbers(stream.take(4, timeout=0))) == [0, 1, 2, 3]
        found = stream.stats().admission
        assert (found.lost, found.used, found.held, found.late) == (4, 4, 0, 0)
        assert found.balanced
        stream.clear()
        stream.close()


HOLDER = """
import sys, redrb
url, namespace, holds = sys.argv[1:]
stream = redrb.ExperienceStream(redrb.connect(url), "math", namespace=namespace)
held = stream.take(2, timeout=60) if holds == "groups" else stream.admit(4, timeout=60)
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("holds", ["groups", "rights"])
def test_what_a_killed_process_of_this_machine_held_goes_to_others_long_before_its_lease_is_over(
    real_url, namespace, holds, caplog
):
    """Its lease lasts for half a minute; its machine knows at once that it has died."""
    with (
        redrb.connect(real_url) as client,
        ExperienceStream(
            client, "math", namespace=namespace, max_staleness=0, groups_per_version=4
        ) as stream,
    ):
        stream.advance(1)
        stream.join_group()
        stream._consumer.attend()  # its heartbeat looks after the others
        if holds == "groups":
            stream.put_many([[numbered(0)], [numbered(1)]], policy_version=1)
        dead = warm.Popen(
            [sys.executable, "-c", HOLDER, real_url, namespace, holds],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert said(dead) == "holds"
            dead.kill()  # nobody has read its exit status yet
            began = time.monotonic()
            if holds == "groups":
                assert numbers(stream.take(2, timeout=25)) == [0, 1]
                assert stream.stats().taken_over == 2
            else:
                stream.admit(4, timeout=25).cancel()
                assert stream.stats().admission.lost == 4
            while "has died" not in caplog.text:  # its finder says so after the reply
                assert time.monotonic() - began < 20
                time.sleep(0.01)
        finally:
            dead.kill()
            dead.communicate(timeout=30)
        stream.clear()
