"""All commands that look, and the page, as a user who may only read: over TLS, and on a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from contextlib import ExitStack

import httpx
import pytest
import redis
import torch

import redrb
from redrb import ExperienceStream, Table
from redrb.cli.__main__ import main
from redrb.environment import child_environment
from redrb.watch.doctor.servers import server_of
from redrb.watch.state.reader import StateReader
from tests.clusters import RedisCluster
from tests.conftest import REAL
from tests.dashboards import Dashboard
from tests.samples import numbered
from tests.servers import Server, free_port, make_certificate, with_tls
from tests.tools import need

SECRET = "c0rrect-horse"
LEASE_MS = 1500
"""So short that workers announce themselves often: `redrb top` waits until they did so twice."""


@pytest.fixture
def place(request, tmp_path):
    """A URL, and its servers: one with TLS, or a cluster."""
    if request.param == "cluster":
        cluster = RedisCluster(next(iter(REAL.values())))
        yield cluster.url, [*cluster.primaries]
        cluster.close()
        return
    [name, *_] = with_tls()
    make_certificate(tmp_path)
    port, certificate = free_port(), str(tmp_path / "cert.pem")
    server = Server(
        REAL.get(name) or need(name),
        "--tls-port",
        str(port),
        "--tls-auth-clients",
        "no",
        "--tls-cert-file",
        certificate,
        "--tls-key-file",
        str(tmp_path / "key.pem"),
    )
    yield f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}", [server]
    server.close()


@pytest.fixture
def printed(capsys):
    """Run a command with --json; returns the records that it prints."""

    def run(*words):
        capsys.readouterr()
        assert main([*words, "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def check_redis_cli(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """redis-cli, which comes with Debian's server, reaches each server as findings name it."""
    monkeypatch.setenv("REDISCLI_AUTH", SECRET)  # else it asks
    program = need("redis-cli")  # all else was checked before
    with redrb.connect(url) as client:
        of_doctor = [server_of(each, {}) for each in client.primaries()]
        for server in (*StateReader(client, "default").look().servers, *of_doctor):
            said = subprocess.run(
                [program, *server.cli, "INFO", "server"],
                env=child_environment(),
                capture_output=True,
                check=True,
                text=True,
                timeout=20,
            )
            assert "tcp_port:" in said.stdout


def put_when_followed(stream: ExperienceStream, servers: list[Server]) -> None:
    """Put a group as soon as a client waits for arrivals; `--follow` shows no earlier ones."""
    deadline = time.monotonic() + 60
    with ExitStack() as scope:
        owners = [scope.enter_context(redis.Redis(port=server.port)) for server in servers]
        while not any(each["cmd"] == "xread" for owner in owners for each in owner.client_list()):
            assert time.monotonic() < deadline, "no client waits for arrivals"
            time.sleep(0.01)
    stream.put(numbered(5), policy_version=1)


@pytest.mark.parametrize(("place", "task"), [("tls", "math"), ("cluster", "")], indirect=["place"])
def test_an_observer_uses_all_that_looks(place, task, monkeypatch, printed):
    url, servers = place
    only = ["--task", "math", "--weights", "policy", "--table", "train"] if task else []
    [rights] = printed("acl", "--role", "observer", "--user", "looks", *only)
    for server in servers:
        with redis.Redis(port=server.port) as owner:
            owner.execute_command("ACL", "SETUSER", "looks", "on", f">{SECRET}", *rights["rules"])
    with (
        redrb.connect(url) as client,
        ExperienceStream(client, "math", weights="policy", lease_ms=LEASE_MS) as stream,
        ExperienceStream(client, "code", lease_ms=LEASE_MS) as other,
        redrb.WeightPublisher(client, "policy") as publisher,
    ):
        publisher.publish({"a": torch.ones(3)})
        stream.put_many([[numbered(number)] for number in range(3)], policy_version=1)
        stream.take(1, timeout=5).reject("nan")
        other.put(numbered(4))
        table = Table(client, "train")
        table.put(["a", "b"], {"x": torch.zeros(2, 3)})
        table.register("actor", ["x"])
        table._claims._open["actor"].stream.close()  # it announces itself seldom
        monkeypatch.setenv("REDRB_URL", url.replace("://", f"://looks:{SECRET}@"))
        shown = {"math", "train:actor"} if task else {"math", "code", "train:actor"}

        [ls] = printed("ls")
        assert {one["name"] for one in ls["tasks"] if one["stats"]} == shown
        assert [one["name"] for one in ls["weights"]] == ["policy"]
        [train] = ls["tables"]
        assert (train["rows"], train["claims"][0]["waiting"]) == (2, 2)
        assert printed("stats", "train")[0] == {**train, "balanced": True}
        [inspected] = printed("inspect", "train", "a")
        assert inspected["rows"][0]["columns"][0]["shape"] == [3]
        [doctor] = printed("doctor", "train", "--over", "0.2")
        unchecked = {one["code"]: one["summary"] for one in doctor["findings"]}["unchecked"]
        assert "values of table train" in unchecked  # it may not search for keys
        [stats] = printed("stats", "math")
        assert stats["groups"][0]["stats"]["ledger"]["put"] == 3
        [inspected] = printed("inspect", "math")
        assert len(inspected["groups"]) == 2
        later = threading.Thread(target=put_when_followed, args=(stream, servers))
        later.start()
        assert printed("inspect", "math", "--follow", "--count", "1")[0]["groups"]
        later.join()
        [top] = printed("top")
        [doctor] = printed("doctor", *only[1:2], "--over", "0.2")
        for found in (top, doctor):
            assert "dead-letters" in {finding["code"] for finding in found["findings"]}
        tasks = {one["name"]: one["readable"] for one in top["state"]["tasks"]}
        assert {name for name, readable in tasks.items() if readable} == shown
        assert [one["version"] for one in top["state"]["weights"]] == [1]
        [metrics] = printed("exporter", "--once", *only[:2])
        put = [one for one in metrics["metrics"] if one["name"] == "redrb_groups_put_total"]
        assert {one["labels"]["task"] for one in put} == ({"math"} if task else shown)
        page = Dashboard(os.environ["REDRB_URL"], "default")
        try:
            assert httpx.get(page.url).status_code == 200
            with httpx.stream("GET", f"{page.url}events", timeout=60) as events:
                data = (line for line in events.iter_lines() if line.startswith("data: "))
                views = (json.loads(line.removeprefix("data: ")) for line in data)
                view = next(each for each in views if each.get("state"))
            assert {one["name"] for one in view["state"]["tasks"] if one["readable"]} == shown
            rollouts = httpx.get(f"{page.url}api/letters?task=math")
            assert [letter["reason"] for letter in rollouts.json()] == ["nan"]
        finally:
            page.close()
        check_redis_cli(os.environ["REDRB_URL"], monkeypatch)
