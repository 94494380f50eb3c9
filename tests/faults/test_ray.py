"""`redrb run --on`: a cluster of Ray keeps the job running, over lost nodes and without a run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import redrb
from redrb.environment import PREFIX, child_environment
from tests.servers import Server, free_port, programs

ray = pytest.importorskip("ray", reason="ray is not installed: make test-ray runs this file")

from ray._private import services  # noqa: E402
from ray._private.state import actors  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TESTS = Path(__file__).parents[1]
LIGHT = {
    "RAY_agent_register_timeout_ms": "240000",  # of 30 s, a busy machine's nodes end
    "RAY_worker_niceness": "0",  # of 15, workers stand still on a busy machine
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}
STORE = {"object_store_memory": 80_000_000}
WAIT_S = 240.0


def _ports() -> dict[str, int]:
    """Return the ports of a node's agents; to choose them Ray gives them 15 s, then it aborts."""
    names = "metrics_agent", "metrics_export", "runtime_env_agent", "dashboard_agent_listen"
    return {f"{name}_port": free_port() for name in names}


class Nodes:
    """A cluster of Ray with four virtual nodes, of which three run workers."""

    def __init__(self) -> None:
        self.client_port, self.made = free_port(), 0
        os.environ |= LIGHT
        head = {
            "num_cpus": 0,
            "include_dashboard": False,
            "ray_client_server_port": self.client_port,
        }
        self.cluster = Cluster(initialize_head=True, head_node_args={**STORE, **head, **_ports()})
        self.working = [self._new() for _ in range(3)]
        ray.init(self.cluster.address, log_to_driver=False)

    @property
    def client_url(self) -> str:
        return f"ray://127.0.0.1:{self.client_port}"

    def _new(self) -> Any:
        self.made += 1
        # each has a folder of its own, as machines do: Ray empties it when it brings a recipe
        own = {"runtime_env_dir_name": f"node-{self.made}"}
        return self.cluster.add_node(num_cpus=2, **STORE, **own, **_ports())

    def replace(self, worker: str) -> None:
        """Kill the node of a worker, and add another one."""
        [place] = [each["Address"]["NodeID"] for each in self._running(worker)]
        [node] = [each for each in self.working if each.node_id == place]
        self.cluster.remove_node(node, allow_graceful=False)
        self.working.remove(node)
        self.working.append(self._new())

    def _running(self, worker: str) -> list[dict[str, Any]]:
        found = [each for each in actors().values() if each["Name"] == worker]
        return [each for each in found if each["State"] == "ALIVE"]

    @staticmethod
    def names() -> list[str]:
        return sorted(each["name"] for each in ray.util.list_named_actors(all_namespaces=True))

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


def until(condition: Callable[[], Any], what: str, seconds: float = WAIT_S) -> Any:
    """Wait for something that tells nobody when it happens."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds:g} s: {what}")


class Run:
    """A `redrb run --on`."""

    def __init__(self, url: str, folder: Path, recipe: str, *flags: str) -> None:
        self.url, self.name, self.folder = url, recipe, folder
        self.log = folder / f"output-{time.monotonic_ns()}.txt"
        self._file = self.log.open("w")
        file = folder / "recipe" / f"{recipe}_recipe.py"  # its folder goes to the nodes
        file.parent.mkdir(exist_ok=True)
        shutil.copy(TESTS / file.name, file)
        words = [str(file), "--out", str(folder / "out"), *flags]
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "redrb.cli", "run", *words],
            env=child_environment(without=PREFIX, REDRB_URL=url),
            stdout=self._file,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def says(self, words: str, seconds: float = WAIT_S) -> None:
        until(lambda: words in self.output or self.popen.poll() is not None, words, seconds)
        assert words in self.output, self.output

    def progresses(self, by: int = 20) -> None:
        """Wait for so many further versions of the weights."""
        with redrb.connect(self.url) as client:
            weights = redrb.WeightSubscriber(client, self.name, namespace=self.name)
            newest = weights.latest()
            weights.wait(newer_than=(newest.version if newest else 0) + by, timeout=WAIT_S)

    def processes(self, worker: str) -> list[psutil.Process]:
        """Return the processes of a worker, on all nodes; but not of other jobs."""
        wanted = {
            "redrb.cli.processes.supervised",
            f"--worker={worker}",
            f"--checkpoints={self.folder / 'checkpoints'}",
        }
        found = psutil.process_iter(["cmdline"])
        return [each for each in found if wanted <= set(each.info["cmdline"] or ())]

    def end(self, number: signal.Signals | None = None, seconds: float = WAIT_S) -> int:
        if number is not None:
            self.popen.send_signal(number)
        return self.popen.wait(seconds)

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._file.close()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A cluster whose nodes are ended with the tests."""
    ask = services.get_node

    def node(*place: Any) -> Any:
        with contextlib.suppress(RuntimeError):  # it has not started yet
            return ask(*place)

    with pytest.MonkeyPatch.context() as patch:
        # Ray itself gives a node 30 s, which a busy machine exceeds
        patch.setattr(services, "get_node", lambda *place: until(lambda: node(*place), "a node"))
        made = Nodes()
        yield made
        made.close()


@pytest.fixture
def start(nodes: Nodes, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start runs on the cluster; nothing of them is left after the test."""
    runs: list[Run] = []
    program = next(iter(programs().values()))
    server = Server(program)

    def begin(recipe: str, *flags: str, on: str = nodes.cluster.address) -> Run:
        shared = "--on", on, "--checkpoints", str(tmp_path / "checkpoints")
        runs.append(Run(server.url, tmp_path, recipe, *shared, *flags))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()
    for each in ray.util.list_named_actors(all_namespaces=True):
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(each["name"], each["namespace"]))
    until(lambda: not nodes.names(), "no actor is left")
    server.close()


def test_five_lost_nodes_cost_no_group_and_train_none_twice(
    nodes: Nodes, start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start("tallying", "--makers", "3", "--target-reward", "1600", "--json")
    run.progresses()
    for worker in ("maker-1", "trainer", "trainer", "maker-3", "trainer"):
        before = run.output.count(f"{worker} was started again")
        nodes.replace(worker)
        until(
            lambda name=worker, least=before: run.output.count(f"{name} was started again") > least,
            f"{worker} is back: {run.output}",
        )
        assert f"{worker} was lost with its actor or its node; Ray starts it again" in run.output
        run.progresses()
    assert run.end(seconds=900) == 0, run.output
    figures = json.loads(run.output.splitlines()[-1])
    assert figures["ledger_balanced"] is True
    assert figures["ledger"]["leased"] == 0
    assert figures["reward_last"] >= 1_600
    events = [json.loads(line) for line in (tmp_path / "out" / "trainer.jsonl").open()]
    counted = [event["twice"] for event in events if event["event"] == "evaluation"]
    assert len(counted) > 10
    assert set(counted) == {0}
    lost = run.output.count("trainer was lost")  # makers may have had its node, too
    assert 4 <= sum(event["event"] == "start" for event in events) <= lost + 1
    assert not nodes.names()
    assert not [each for name in ("trainer", "maker-1") for each in run.processes(name)]


def test_a_killed_run_leaves_the_job_running_and_the_next_one_follows_it(
    nodes: Nodes, start: Callable[..., Run], tmp_path: Path
) -> None:
    first = start("counting", "--steps", "1000000")
    first.progresses()
    first.popen.kill()
    first.popen.wait()
    first.progresses()
    second = start("counting", "--steps", "1000000", "--makers", "3")
    second.says("follows the workers that run: maker-1, maker-2, trainer")
    until(lambda: nodes.names() == ["maker-1", "maker-2", "maker-3", "trainer"], "a third maker")
    second.progresses()
    assert second.end(signal.SIGHUP) == 129, second.output
    assert "the terminal is gone; the same command follows the job again" in second.output
    first.progresses()
    third = start("counting", "--steps", "1000000", "--makers", "1", "--seed", "3")
    third.says("trainer runs with other settings")
    third.progresses()
    assert third.end(signal.SIGINT) == 130, third.output
    assert re.search(r"ledger balanced +│ +yes", third.output), third.output
    assert not nodes.names()
    assert not third.processes("trainer")
    steps = [
        event["step"]
        for event in map(json.loads, (tmp_path / "out" / "trainer.jsonl").open())
        if event["event"] == "step"
    ]
    assert sorted(set(steps)) == list(range(1, max(steps) + 1))  # those without a run, too


def test_of_two_runs_of_a_job_the_later_one_follows_it(
    nodes: Nodes, start: Callable[..., Run]
) -> None:
    first = start("counting", "--steps", "1000000")
    first.progresses()
    second = start("counting", "--steps", "1000000", "--out", "elsewhere")
    assert first.end() == 1, first.output
    assert "another `redrb run --on` follows this job now" in first.output
    second.progresses()
    assert second.end(signal.SIGINT) == 130, second.output
    assert not nodes.names()


def test_a_process_that_dies_is_started_again_and_given_up_by_the_rule_of_a_run(
    nodes: Nodes, start: Callable[..., Run]
) -> None:
    run = start("counting", "--steps", "1000000", "--fails", "maker-2", "--restarts", "1")
    run.says("maker-2 ended with status 1; restart in 1 s: ValueError: maker-2 cannot count")
    run.says("maker-2 ended with status 1, 2 times in a row, and was given up")
    run.progresses()
    run.processes("trainer")[0].kill()
    run.says("trainer was killed by SIGKILL")
    run.says("trainer was started again")
    run.progresses()
    assert run.end(signal.SIGINT) == 130, run.output
    assert re.search(r"ledger balanced +│ +yes", run.output), run.output
    assert not nodes.names()


def test_a_job_that_ends_while_nobody_follows_it_leaves_nothing(
    nodes: Nodes, start: Callable[..., Run]
) -> None:
    run = start("counting", "--steps", "500")
    run.progresses()
    run.popen.kill()
    nodes.replace("trainer")  # the new one gets the recipe from Ray
    until(lambda: not nodes.names(), "the workers have left Ray")
    assert not run.processes("trainer")
    again = start("counting", "--steps", "500", "--json")
    assert again.end() == 0, again.output
    assert json.loads(again.output.splitlines()[-1])["reward_last"] == 500
    assert re.search(r"ledger balanced +│ +yes", again.output), again.output


def test_a_second_ctrl_c_ends_at_once(
    nodes: Nodes, start: Callable[..., Run], tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    pipe.touch()
    run = start("counting", "--makers", "1", "--stuck", str(pipe))
    until(pipe.read_text, "the step hangs")
    run.popen.send_signal(signal.SIGINT)
    until(lambda: not run.processes("maker-1"), "the maker has ended in order")
    assert run.processes("trainer")
    assert run.end(signal.SIGINT, seconds=20) == 130
    until(lambda: not nodes.names() and not run.processes("trainer"), "nothing is left", 20)


def test_through_a_ray_client_and_with_workers_for_which_there_is_no_room(
    nodes: Nodes, start: Callable[..., Run]
) -> None:
    run = start("counting", "--steps", "1000000", "--makers", "8", on=nodes.client_url)
    run.says("waits for a node with room for it")
    run.progresses()
    assert run.end(signal.SIGTERM) == 143, run.output
    assert re.search(r"ledger balanced +│ +yes", run.output), run.output
    assert not nodes.names()
