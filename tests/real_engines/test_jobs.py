"""Jobs of TRL and of a recipe on a real vLLM, whose processes are killed at random moments.

Every stored sample has log-probabilities of the weights that it names, and nothing is lost.
ENGINES_MINUTES says how long faults happen (default: 2).
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import redrb
from redrb import BufferItem, WeightSubscriber
from redrb.errors import BatchTimeout, StoreUnavailable, WeightTimeout
from tests.real_engines.conftest import VLLM, RealVLLM, log_probs
from tests.real_engines.workers import Job
from tests.servers import Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not VLLM, reason="needs VLLM: a folder with bin/vllm and model"),
]

MINUTES = float(os.environ.get("ENGINES_MINUTES", "2"))
WAIT_S = 300.0
"""Longest time until a job goes on."""

TOLERANCE = 0.15
"""Mean difference of a sample's log-probabilities: of bfloat16, computed in two ways."""


class Process:
    """A worker that is killed and started again with the same arguments."""

    def __init__(self, log: Path, command: list[str], **environment: str) -> None:
        self._log, self._command = log, command
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self._command],
                cwd=Path(__file__).parents[2],
                env=self._environment,
                stdout=log,
                stderr=log,
            )

    def check(self) -> None:
        """Fail if it has ended by itself."""
        assert self._process.poll() is None, self._log.read_text()[-4000:]

    def kill(self) -> None:
        self.check()
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """End it as a user does, or kill it if it does not end."""
        self._process.terminate()
        try:
            self._process.wait(90)
        finally:
            self._process.kill()
            self._process.wait()


class Witness:
    """Takes every group in a consumer group of its own, and keeps the weights of every version."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._client = redrb.connect(job.url, retry_s=120)
        self.groups: dict[int, list[BufferItem]] = {}
        self.versions: dict[int, dict[str, torch.Tensor]] = {}
        self._ended = threading.Event()
        self._errors: list[Exception] = []
        self._threads = [
            threading.Thread(target=self._run, args=(each,)) for each in (self._take, self._follow)
        ]
        # the first stream of a job names its settings, and only a trainer knows them
        WeightSubscriber(self._client, job.weights, namespace=job.namespace).wait(timeout=WAIT_S)
        self._stream = job.stream(self._client, group="witness")
        self._stream.join_group()
        for thread in self._threads:
            thread.start()

    def _run(self, look: Callable[[], None]) -> None:
        try:
            while not self._ended.is_set():
                look()
        except Exception as error:  # noqa: BLE001 (it fails the test)
            self._errors.append(error)

    def _take(self) -> None:
        try:
            lease = self._stream.take(1, timeout=2)
        except (BatchTimeout, StoreUnavailable):
            return
        self.groups |= dict(zip(lease.ids, lease.groups(), strict=True))
        lease.ack()

    def _follow(self) -> None:
        subscriber = WeightSubscriber(
            self._client, self._job.weights, namespace=self._job.namespace
        )
        try:
            newest = subscriber.wait(max(self.versions, default=None), timeout=2).version
        except (WeightTimeout, StoreUnavailable):
            return
        prefix = f"{self._job.prefix}." if self._job.prefix else ""
        self.versions[newest] = {
            name.removeprefix(prefix): each.clone()
            for name, each in subscriber.fetch(newest).items()
        }

    def check(self) -> None:
        """Fail if a thread has ended."""
        assert not self._errors, self._errors

    def close(self) -> None:
        """End its threads."""
        self._ended.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        self._stream.close()
        self._client.close()
        self.check()

    def sampled(self) -> set[int]:
        """Return the versions of the groups that it has seen."""
        groups = list(self.groups.values())
        return {int(item.policy_version or 0) for group in groups for item in group}

    def rewards(self) -> dict[int, float]:
        """Return the mean reward of the samples of each version."""
        found: dict[int, list[float]] = {}
        for item in (item for group in self.groups.values() for item in group):
            assert item.reward is not None
            found.setdefault(int(item.policy_version or 0), []).append(float(item.reward))
        return {version: round(sum(each) / len(each), 2) for version, each in sorted(found.items())}

    def compared(self, vllm: RealVLLM) -> dict[int, float]:
        """Return the largest mean difference of a sample's log-probabilities by version."""
        model, found = vllm.policy(0), dict[int, float]()
        of_versions: dict[int, list[BufferItem]] = {}
        for item in (item for group in self.groups.values() for item in group):
            assert item.token_versions is not None
            for version in set(item.token_versions.tolist()):
                of_versions.setdefault(version, []).append(item)
        for version, items in sorted(of_versions.items()):
            model.load_state_dict(self.versions[version], strict=False)
            for item in items:
                assert item.sequences is not None
                assert item.token_versions is not None
                assert item.action_log_probs is not None
                chosen = item.token_versions == version
                expected = log_probs(model, item.sequences.tolist())[chosen]
                mean = float((item.action_log_probs[chosen] - expected).abs().mean())
                found[version] = max(found.get(version, 0.0), mean)
        return found


class Workers:
    """The processes of a job, which are killed and started again."""

    def __init__(self, kind: str, job: Job, server: Server, vllm: RealVLLM) -> None:
        folder = Path(job.folder)
        if kind == "trl":
            command = ["tests.real_engines.workers", "trl", job.json()]
        else:
            recipe = str(Path(__file__).with_name("policy_recipe.py"))
            command = ["workers.trainer", recipe, "--url", job.url, "--namespace", job.namespace]
            command += ["--checkpoints", str(folder / "checkpoints")]
        self.trainer = Process(folder / "trainer.log", command, POLICY=job.policy)
        maker = ["tests.real_engines.workers", "maker", job.json()]
        self.maker = Process(folder / "maker.log", maker)
        self._parts: dict[str, Process | Server | RealVLLM] = {
            "vLLM": vllm,
            "Redis": server,
            "trainer": self.trainer,
            "maker": self.maker,
        }
        self.kills = dict.fromkeys([*self._parts, "all"], 0)

    def check(self) -> None:
        """Fail if one has ended by itself."""
        self.trainer.check()
        self.maker.check()

    def kill(self, fault: str, pause_s: float) -> None:
        """Kill one part or all, and start it again."""
        self.kills[fault] += 1
        killed = [part for name, part in self._parts.items() if fault in (name, "all")]
        for part in killed:
            part.kill()
        threading.Event().wait(pause_s)
        for part in killed:
            part.start()

    def close(self) -> None:
        """End them as a user does."""
        try:
            self.maker.end()
        finally:
            self.trainer.end()


def wait_for_versions(count: int, witness: Witness, workers: Workers) -> None:
    """Wait until further versions are published and sampled from."""
    wanted = max(witness.sampled(), default=0) + count
    ends = time.monotonic() + WAIT_S
    while max(witness.sampled(), default=0) < wanted:
        witness.check()
        workers.check()
        assert time.monotonic() < ends, f"no group of version {wanted}: {workers.kills}"
        threading.Event().wait(0.2)


@pytest.mark.parametrize("kind", ["trl", "recipe"])
def test_samples_name_their_weights_whatever_is_killed(
    kind: str, vllm: RealVLLM, namespace: str, tmp_path: Path
) -> None:
    dice = random.Random(os.environ.get("ENGINES_SEED", kind))
    policy = tmp_path / "policy"
    shutil.copytree(vllm.model, policy)
    vllm.policy(1).save_pretrained(policy)  # not the weights with which vLLM starts
    with ExitStack() as stack:
        server = Server("/usr/bin/redis-server", "--appendonly", "yes", "--appendfsync", "always")
        stack.callback(server.close)
        of_recipe = kind == "recipe"
        job = Job(
            url=server.url,
            namespace=namespace,
            engine=vllm.url,
            model=str(vllm.model),
            policy=str(policy),
            folder=str(tmp_path),
            weights="math" if of_recipe else "policy",
            prefix="actor" if of_recipe else "",
        )
        workers = Workers(kind, job, server, vllm)
        stack.callback(workers.close)
        witness = Witness(job)
        stack.callback(witness.close)
        wait_for_versions(3, witness, workers)
        ends = time.monotonic() + 60 * MINUTES
        while time.monotonic() < ends:
            threading.Event().wait(dice.uniform(3, 15))
            [fault] = dice.choices(list(workers.kills), (3, 3, 3, 1, 1))
            workers.kill(fault, dice.uniform(0, 3))
            wait_for_versions(1, witness, workers)
        workers.close()
        witness.close()
        check_ledgers(witness, job)
    differences = witness.compared(vllm)
    samples = sum(map(len, witness.groups.values()))
    print(f"{kind}: {samples} samples of {len(differences)} versions, killed: {workers.kills}")
    print(f"rewards by version: {witness.rewards()}")
    assert {version: each for version, each in differences.items() if each > TOLERANCE} == {}


def check_ledgers(witness: Witness, job: Job) -> None:
    """Compare what was put with what the witness has seen and what the trainer has trained."""
    with redrb.connect(job.url) as client, job.stream(client) as stream:
        ledger = stream.stats().ledger
        print(ledger)
        assert ledger.balanced
        assert (ledger.leased, ledger.filtered, ledger.dead, ledger.evicted) == (0, 0, 0, 0)
        seen = job.stream(client, group="witness").stats().ledger
        assert (seen.acked, seen.filtered, seen.dead) == (len(witness.groups), 0, 0)
