"""Pods of examples/kubernetes run here; Prometheus evaluates the query of the autoscaler."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

import redrb
from redrb.cli import __main__ as cli
from redrb.recipe.loading import load
from redrb.stream.task.lookup import task_stats
from tests.integration.test_operations_pages import script, started
from tests.manifests import ROOT, SECRETS, Object, named, render, variables_of
from tests.servers import await_server, free_port, programs
from tests.tools import need
from tests.unit.test_metrics import check_by_promtool


@pytest.fixture
def rendered() -> dict[str, list[Object]]:
    return render()


def test_the_gateway_is_started_with_flags_that_it_has(
    rendered: dict[str, list[Object]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gateway, _ = named(rendered["chosen"], "Deployment", "engines")["spec"]["template"]["spec"][
        "containers"
    ]
    token = variables_of(gateway)["REDRB_GATEWAY_TOKEN"]
    monkeypatch.setenv("REDRB_GATEWAY_TOKEN", token)
    monkeypatch.setenv("REDRB_URL", f"redis://127.0.0.1:{free_port()}/0")
    assert cli.main(gateway["command"][1:]) == 1
    assert "is not reachable" in capsys.readouterr().err


class Node:
    """Starts containers of rendered pods as processes of this machine, in a folder.

    Paths of volumes are folders here, programs of the images are scripts in `bin`, and Redis has
    another port.
    """

    def __init__(self, folder: Path, objects: list[Object]) -> None:
        self.folder, self.objects, self.port = folder, objects, free_port()
        for each in objects:
            if each["kind"] == "ConfigMap":
                (folder / each["metadata"]["name"]).mkdir()
                for name, text in each["data"].items():
                    (folder / each["metadata"]["name"] / name).write_text(text)
        for name in ("data", "checkpoints", "bin", "tmp"):
            (folder / name).mkdir()
        server = list(programs().values())[-1]
        script(folder, "bin/valkey-server", f'exec {server} "$@" --port {self.port}')
        script(folder, "bin/valkey-cli", f'exec {need("redis-cli")} -p {self.port} "$@"')
        modules = {
            "redrb": "redrb.cli",
            "redrb-maker": "workers.maker",
            "redrb-trainer": "workers.trainer",
        }
        for name, module in modules.items():
            script(folder, f"bin/{name}", f'exec {sys.executable} -m {module} "$@"')
        self._paths = {
            "/etc/redis/": f"{folder}/redis/",
            "/recipe/": f"{folder}/recipe/",
            "/checkpoints": f"{folder}/checkpoints",
            "/tmp/": f"{folder}/tmp/",
            "dir /data": f"dir {folder}/data",
            "@redis:6379": f"@127.0.0.1:{self.port}",
        }

    def container(self, kind: str, name: str) -> Object:
        [container] = named(self.objects, kind, name)["spec"]["template"]["spec"]["containers"]
        return container

    def here(self, text: str) -> str:
        """Return a text of an object with the paths of this machine."""
        anywhere = "|".join(map(re.escape, self._paths))
        return re.sub(anywhere, lambda match: self._paths[match[0]], text)

    def start(self, kind: str, name: str, *more: str, **variables: str) -> Any:
        """Return a block in which a container runs, with more arguments and variables."""
        container = self.container(kind, name)
        words = [self.here(word) for word in container["command"]]
        return started([*words, *more], self.folder, self._environment(container, variables))

    def probe(self, kind: str, name: str, which: str) -> int:
        """Return the status of a probe's command."""
        container = self.container(kind, name)
        words = [self.here(word) for word in container[which]["exec"]["command"]]
        return subprocess.run(
            words, env=self._environment(container, {}), check=False, timeout=30
        ).returncode

    def _environment(self, container: Object, more: dict[str, str]) -> dict[str, str]:
        own = {name: self.here(value) for name, value in variables_of(container).items()}
        return {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            **own,
            **more,
        }

    def events(self, trainer: subprocess.Popen[bytes]) -> Iterator[str]:
        """Yield the events of the trainer, as they are written, until it has ended."""
        file = self.folder / "tmp" / "metrics.jsonl"
        file.touch()
        words = ["tail", f"--pid={trainer.pid}", "-n", "+1", "-s", "0.1", "-f", file]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as tail:
            try:
                yield from (json.loads(line)["event"] for line in tail.stdout)
            finally:
                tail.kill()


def test_the_pods_train_together(rendered: dict[str, list[Object]], tmp_path: Path) -> None:
    """Redis, trainer, makers and exporter as they are rendered; the trainer is evicted."""
    node = Node(tmp_path, rendered["chosen"])
    url = f"redis://:{SECRETS['redrb']['password']}@127.0.0.1:{node.port}/0"
    assert node.probe("StatefulSet", "redis", "readinessProbe") != 0
    with node.start("StatefulSet", "redis"), redis.Redis.from_url(url) as client:
        await_server(client)
        assert node.probe("StatefulSet", "redis", "startupProbe") == 0
        assert client.config_get("appendonly", "dir", "maxmemory") == {
            "appendonly": "yes",
            "dir": str(tmp_path / "data"),
            "maxmemory": str(6 << 30),
        }
        with node.start("Deployment", "makers") as maker:
            with node.start("Job", "trainer", REDRB_TARGET_REWARD="2") as trainer:
                steps = (event for event in node.events(trainer) if event == "step")
                assert [next(steps), next(steps)] == ["step", "step"]
                assert node.probe("Job", "trainer", "startupProbe") == 0
                assert node.probe("Job", "trainer", "livenessProbe") == 0
                with node.start("Deployment", "exporter", "--once") as exporter:
                    assert exporter.wait(60) == 0
                trainer.send_signal(signal.SIGTERM)
                assert trainer.wait(60) == 143
            maker.send_signal(signal.SIGTERM)
            assert maker.wait(60) == 0
        assert list((tmp_path / "checkpoints").iterdir())
        with redrb.connect(url) as connected:
            ledger = task_stats(connected, "sort", namespace="default", group="default").ledger
        assert ledger.acked > 0
        assert ledger.balanced
    output = (tmp_path / "output").read_text()
    for name in metrics_of(scaling(rendered)["query"]):
        assert f"\n{name}{{" in output


def scaling(rendered: dict[str, list[Object]]) -> dict[str, str]:
    """Return what KEDA asks Prometheus."""
    [trigger] = named(rendered["chosen"], "ScaledObject", "makers")["spec"]["triggers"]
    return dict(trigger["metadata"])


def metrics_of(query: str) -> list[str]:
    return re.findall(r"redrb_\w+", query)


@pytest.mark.parametrize(
    ("held", "trained", "makers"),
    [
        ("64x60", "0+60x60", 2),  # two makers work, the trainer always trains: as they are
        ("64x60", "0+30x60", 4),  # it waits half of the time
        ("64x60", "0+1x60", 8),  # it hardly trains: not more than four times as many at once
        ("64x60", "0x60", 8),  # before its first step
        ("32x60", "0+60x60", 1),  # of two makers one waits for rights
        ("64x60", "_x60", None),  # the trainer has not started: no data, so the fallback
        ("_x60", "0+60x60", None),  # a task without admission
    ],
)
def test_the_trainer_decides_how_many_makers_there_are(
    rendered: dict[str, list[Object]], tmp_path: Path, held: str, trained: str, makers: int | None
) -> None:
    """Prometheus' own tool evaluates the query; KEDA divides it by the threshold."""
    found = scaling(rendered)
    assert found["ignoreNullValues"] == "false"  # KEDA would take no data for 0
    series = (
        f'redrb_rights_held{{namespace="n",task="sort"}} {held}',
        f'redrb_worker_step_seconds_total{{task="sort",role="trainer",worker="t"}} {trained}',
        'redrb_rights_held{namespace="n",task="other"} 900x60',
    )
    check_by_promtool(
        tmp_path, {"tests": [case(f"{found['query']} / {found['threshold']}", series, makers)]}
    )
    assert int(found["threshold"]) == load("sorting")[0].prompts_per_step


def case(query: str, series: tuple[str, ...], value: float | None) -> Object:
    """Return a case of promtool: the value of a query after half an hour; None: no data."""
    rows = [each.rpartition(" ") for each in series]
    samples = [] if value is None else [{"labels": "{}", "value": value}]
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, _, values in rows],
        "promql_expr_test": [{"expr": query, "eval_time": "30m", "exp_samples": samples}],
    }


@pytest.mark.parametrize("status", [0, 2])
def test_the_trainers_shell_ends_with_the_status_of_the_trainer(
    rendered: dict[str, list[Object]], tmp_path: Path, status: int
) -> None:
    node = Node(tmp_path, rendered["plain"])
    script(tmp_path, "bin/redrb-trainer", f"exit {status}")
    with node.start("Job", "trainer") as shell:
        assert shell.wait(10) == status
