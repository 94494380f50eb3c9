"""docker-compose.yml: parsed, and the command of every service run against a local server."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

import redrb
from redrb.stream.task.lookup import task_stats
from tests.servers import Server, programs
from tests.tools import need

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
COMPOSE_PAGE = ROOT / "docs" / "how-to" / "compose.md"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services, with the defaults of all variables."""
    return services_with()


def services_with(**variables: str) -> dict[str, Any]:
    """Return the services with ${NAME:-default} and $$ replaced as compose does."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[2])

    text = (ROOT / "docker-compose.yml").read_text()
    resolved = re.sub(r"\$\$|\$\{(\w+):-([^}]*)\}", value, text)
    return dict(yaml.safe_load(resolved)["services"])


def test_the_page_names_each_variable() -> None:
    used = re.findall(r"\$\{(REDRB_\w+)", (ROOT / "docker-compose.yml").read_text())
    rows = re.findall(r"^\| (`REDRB_.*?) \|", COMPOSE_PAGE.read_text(), re.MULTILINE)
    assert set(used) == set(re.findall(r"REDRB_\w+", " ".join(rows)))


@pytest.fixture
def compose_redis(services: dict[str, Any]) -> Iterator[Server]:
    """A local server with the arguments of the service `redis`."""
    server = Server(list(programs().values())[-1], *services["redis"]["command"][1:])
    yield server
    server.close()


def test_the_services_are_those_of_a_cluster(services: dict[str, Any]) -> None:
    workers = ("makers", "trainer", "gpu-makers", "gpu-trainer")
    assert set(services) == {"redis", *workers}
    assert services["makers"]["deploy"]["replicas"] == 2
    for name in workers:
        gpus = services[name].get("deploy", {}).get("resources", {}).get("reservations", {})
        assert bool(gpus) == name.startswith("gpu-")
        assert services[name].get("profiles", []) == (["gpu"] if gpus else [])
        assert services[name]["depends_on"]["redis"]["condition"] == "service_healthy"
        assert services[name]["environment"]["REDRB_URL"] == "redis://redis:6379/0"
        assert services[name]["environment"].get("REDRB_DEVICE") == ("cuda" if gpus else None)
        assert ("REDRB_CHECKPOINTS" in services[name]["environment"]) == ("trainer" in name)


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
    cli = [need("redis-cli"), "-p", str(compose_redis.port), *probe[1:]]
    assert subprocess.run(cli, capture_output=True, text=True, check=True).stdout == "PONG\n"


@pytest.mark.slow
def test_the_workers_commands_train_together(
    services: dict[str, Any], compose_redis: Server, tmp_path: Path
) -> None:
    """The commands and variables of the services, on another host and port, for a few steps."""
    started: list[subprocess.Popen[str]] = []

    def start(name: str, **variables: str) -> subprocess.Popen[str]:
        service = services[name]
        words = [*service["entrypoint"], *service["command"]]
        environment = {**service["environment"], **variables, "PATH": f"{BIN}:/usr/bin:/bin"}
        environment["REDRB_URL"] = compose_redis.url
        if "REDRB_CHECKPOINTS" in environment:
            environment["REDRB_CHECKPOINTS"] = str(tmp_path)
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                words,
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
        assert trainer.wait(200) == 0
        for maker in makers:
            maker.terminate()
            assert maker.wait(60) == 0
        with redrb.connect(compose_redis.url) as client:
            stats = task_stats(client, "sort", namespace="default", group="default")
        assert stats.ledger.acked > 0
        assert stats.ledger.leased == 0
        assert stats.ledger.balanced
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_the_image_has_what_the_recipes_of_redrb_need(services: dict[str, Any]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    names = services["trainer"]["build"]["args"]["EXTRAS"].split(",")
    assert set(names) <= set(extras)
    needed = {re.split("[>=<]", each)[0] for name in names for each in extras[name]}
    assert needed >= {"transformers", "gymnasium"}
    dockerfile = (ROOT / "Dockerfile").read_text()
    declared = dict(re.findall(r"^ARG (\w+)=(.*)$", dockerfile, re.MULTILINE))
    assert declared == services["trainer"]["build"]["args"]
    assert '[$EXTRAS]"' in dockerfile


def test_a_recipe_of_the_user_runs_with_its_requirements(tmp_path: Path) -> None:
    """The entrypoint with a user's folder in the place of /recipes, and a pip that only prints."""
    services = services_with(REDRB_RECIPES=str(tmp_path), REDRB_RECIPE="/recipes/my_recipe.py")
    for name in ("makers", "trainer"):
        assert f"{tmp_path}:/recipes:ro" in services[name]["volumes"]
        assert services[name]["environment"]["REDRB_RECIPE"] == "/recipes/my_recipe.py"
    pip = tmp_path / "bin" / "pip"
    pip.parent.mkdir()
    pip.write_text('#!/bin/sh\necho "$@"\n')
    pip.chmod(0o755)
    words = [part.replace("/recipes", str(tmp_path)) for part in services["makers"]["entrypoint"]]

    def said() -> list[str]:
        done = subprocess.run(
            [*words, "echo", "the worker"],
            env={"PATH": f"{pip.parent}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()

    assert said() == ["the worker"]
    (tmp_path / "requirements.txt").write_text("einops\n")
    installed, worker = said()
    assert installed == f"install --quiet -r {tmp_path}/requirements.txt"  # these choose torch
    assert worker == "the worker"
