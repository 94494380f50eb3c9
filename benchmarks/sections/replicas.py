"""What a put costs that waits for a replica (`min_replicas`), puts alone, on loopback."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

import redis

from benchmarks.options import Options
from benchmarks.race import lasting, race, ratio, sides, summary
from benchmarks.server import Server, private_server
from redrb.stream.task.settings import SettingArguments

SHAPES = ("rlhf-1k", "grpo", "agent")
QUICK = ("agent",)
FOLLOWS_S = 30
"""Longest time for a new replica to follow."""

WAITING = cast(SettingArguments, {"min_replicas": 1})
"""An argument of the stream that is no setting of the task."""


def run(options: Options) -> dict[str, Any]:
    """Return the rates of puts that wait for no replica and for one, with the replica there."""
    found: dict[str, Any] = {}
    with private_server(options.server) as primary:
        address = urlsplit(primary.url)
        follow = ("--replicaof", address.hostname or "", str(address.port))
        with private_server(options.server, *follow), sides(1, 0) as team:
            _wait_until_followed(primary)
            for shape in QUICK if options.quick else SHAPES:
                one = partial(team.run, primary, "redrb", shape)
                contestants = {
                    "no wait": lasting(one, options.round_s / 2),
                    "one replica": lasting(partial(one, settings=WAITING), options.round_s / 2),
                }
                rounds = race(contestants, options.rounds, f"{shape}, replica")
                found[shape] = {
                    "systems": {name: summary(each) for name, each in rounds.items()},
                    "over_no_wait": round(ratio(rounds["one replica"], rounds["no wait"]), 3),
                }
    return {"server": primary.name, "shapes": found}


def _wait_until_followed(primary: Server) -> None:
    deadline = time.monotonic() + FOLLOWS_S
    with redis.Redis.from_url(primary.url) as client:
        while not _is_followed(client):
            if time.monotonic() > deadline:
                raise SystemExit("the replica does not follow")
            time.sleep(0.1)


def _is_followed(client: redis.Redis) -> bool:
    found = client.info("replication")
    assert isinstance(found, dict)
    return bool(found["connected_slaves"]) and found["slave0"]["state"] == "online"
