"""docker-compose.yml: parsed, and the command of every service run against a local server."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

import redrb
from redrb.stream.task.inspection import task_stats
from tests.servers import Server, programs

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services, with ${NAME:-default} replaced by the default as compose does."""
    text = (ROOT / "docker-compose.yml").read_text()
    resolved = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    return dict(yaml.safe_load(resolved)["services"])


@pytest.fixture
def compose_redis(services: dict[str, Any]) -> Iterator[Server]:
    """A local server with the arguments of the service `redis`."""
    server = Server(list(programs().values())[-1], *services["redis"]["command"][1:])
    yield server
    server.close()


def test_the_services_are_those_of_a_cluster(services: dict[str, Any]) -> None:
    assert set(services) == {"redis", "makers", "trainer"}
    assert services["makers"]["deploy"]["replicas"] == 2
    for name in ("makers", "trainer"):
        assert services[name]["depends_on"]["redis"]["condition"] == "service_healthy"
        assert services[name]["environment"]["REDRB_URL"] == "redis://redis:6379/0"


def test_the_redis_service_keeps_data_and_never_evicts(
    services: dict[str, Any], compose_redis: Server
) -> None:
    with redis.Redis(port=compose_redis.port) as client:
        settings = (
            client.config_get("appendonly", "appendfsync", "maxmemory", "maxmemory-policy")
            if client.info("server")["redis_version"] >= "7"
            else {
                key: value
                for name in ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy")
                for key, value in client.config_get(name).items()
            }
        )
    assert settings == {
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory": str(2 * 1024**3),
        "maxmemory-policy": "noeviction",
    }
    kind, *probe = services["redis"]["healthcheck"]["test"]
    assert kind == "CMD"
    cli = ["redis-cli", "-p", str(compose_redis.port), *probe[1:]]
    assert subprocess.run(cli, capture_output=True, text=True, check=True).stdout == "PONG\n"


def test_the_workers_commands_train_together(
    services: dict[str, Any], compose_redis: Server
) -> None:
    """The commands and variables of the services, on another host and port, for a few steps."""
    started: list[subprocess.Popen[str]] = []

    def start(name: str, **variables: str) -> subprocess.Popen[str]:
        service = services[name]
        program, *arguments = service["command"]
        environment = {**service["environment"], **variables}
        environment["REDRB_URL"] = compose_redis.url
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [str(BIN / program), *arguments],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                text=True,
            )
        started.append(process)
        return process

    try:
        trainer = start("trainer", REDRB_STEPS="3", REDRB_EVALUATE_EVERY="3")
        makers = [start("makers") for _ in range(services["makers"]["deploy"]["replicas"])]
        assert trainer.wait(60) == 0
        for maker in makers:
            maker.terminate()
            assert maker.wait(15) == 0
        with redrb.connect(compose_redis.url) as client:
            task = services["makers"]["environment"]["REDRB_TASK"]
            stats = task_stats(client, task, namespace="default", group="default")
        assert stats.ledger.acked > 0
        assert stats.ledger.leased == 0
        assert stats.ledger.balanced
    finally:
        for process in started:
            process.kill()
            process.wait()
