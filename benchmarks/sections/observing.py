"""The server's work for those who look at a task with a hundred workers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgpack
import torch

import redrb
from benchmarks.options import Options
from benchmarks.server import private_server
from redrb.connection import Client
from redrb.stream import ExperienceStream
from redrb.stream.task.calls import Announce
from redrb.watch.state.reader import StateReader

CONSUMER_GROUPS = (1, 16)
WORKERS = 100
WAITING = 2000
LEASED = 100
OBSERVERS = 20
LOOKS = 400
QUICK_LOOKS = 40

ANNOUNCED_A_LOOK = 40
"""Workers that announce themselves in a second."""

_SAID = {
    "role": "maker",
    "host": "gpu-node-17",
    "pid": 4242,
    "redrb": redrb.__version__,
    "period_s": 2.5,
    "lease_s": 10.0,
    "uptime_s": 1234.5,
    "weight_version": 42,
    "groups": 1234,
    "samples": 9876,
    "metrics": {"reward": 0.5, "loss": 0.1, "kl": 0.01},
}


def run(options: Options) -> dict[str, Any]:
    """Return the server's processor time for a look, and its share for many observers."""
    looks = QUICK_LOOKS if options.quick else LOOKS
    found = {}
    for groups in CONSUMER_GROUPS:
        with private_server(options.server) as server, redrb.connect(server.url) as client:
            spent_s = min(_spent_s(client, groups, looks, f"round-{turn}") for turn in range(3))
            name = server.name
        found[str(groups)] = {
            "server_us_a_look": round(spent_s * 1e6),
            "percent_of_a_core": round(spent_s * OBSERVERS * 100, 2),
        }
    return {
        "server": name,
        "workers": WORKERS,
        "observers": OBSERVERS,
        "consumer_groups": found,
    }


def _spent_s(client: Client, groups: int, looks: int, task: str) -> float:
    """Return the server's processor time for a look, announcements left out."""
    figure = torch.tensor(0.5)
    item = redrb.BufferItem(
        torch.arange(4),
        torch.zeros(2),
        values=figure,
        reward=figure,
        kl=figure,
        advantages=figure,
        policy_version=1,
    )
    with ExitStack() as scope:
        stream = scope.enter_context(ExperienceStream(client, task))
        stream.advance(4)  # a bound has no effect before the task knows the newest version
        stream.configure(max_staleness=4)
        for number in range(groups):
            name = f"group-{number}" if number else "default"
            scope.enter_context(ExperienceStream(client, task, group=name)).join_group()
        stream.put_many([[item]] * WAITING)
        for number in range(groups):
            name = f"group-{number}" if number else "default"
            reading = scope.enter_context(ExperienceStream(client, task, group=name))
            scope.callback(reading.take(LEASED, timeout=10).release)
        reader = StateReader(client, "default", tasks=[task])
        store, packed = stream._task.store, msgpack.packb(_SAID)

        def seconds_of(look: Callable[[], object]) -> float:
            before_s = _processor_s(client)
            for number in range(looks * ANNOUNCED_A_LOOK):
                worker = f"gpu-node-17-{number % WORKERS:012d}"
                store.call(Announce(worker, ended=False), packed)
                if number % ANNOUNCED_A_LOOK == 0:
                    look()
            return _processor_s(client) - before_s

        seconds_of(reader.look)
        return (seconds_of(reader.look) - seconds_of(lambda: None)) / looks


def _processor_s(client: Client) -> float:
    """Return the processor time that the server has used."""
    lines = client.execute("INFO", "cpu").decode().splitlines()
    facts = dict(line.split(":") for line in lines if ":" in line)
    return float(facts["used_cpu_sys"]) + float(facts["used_cpu_user"])
