"""The worker commands as processes: they end cleanly, start late, die, and start again."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import redrb
from redrb.environment import PREFIX, child_environment
from redrb.recipes.sorting.policy import ActorCritic
from redrb.runtime.broadcast import Broadcast
from redrb.stream.task.inspection import task_stats
from tests.servers import programs

Event = dict[str, Any]
Start = Callable[..., "Process"]

on_one_server = pytest.mark.parametrize("real_url", list(programs())[:1], indirect=True)


class Process:
    """One worker, whose metrics are read line by line."""

    def __init__(self, url: str, module: str, *arguments: str) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the test)
        self.popen = subprocess.Popen(
            [sys.executable, "-m", module, "sorting", "--metrics", "-", *arguments],
            env=child_environment(without=PREFIX, REDRB_URL=url),
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def error_output(self) -> str:
        """Return what it wrote to standard error, after its end."""
        self.errors.seek(0)
        return self.errors.read()

    def until(self, event: str, count: int = 1) -> list[Event]:
        """Read metrics until `event` came `count` times; returns these."""
        found: list[Event] = []
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            record = json.loads(line)
            if record["event"] == event:
                found.append(record)
                if len(found) == count:
                    return found
        raise AssertionError(f"the worker ended before event {event!r} came {count} times")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, read what is left and return the exit status."""
        self.popen.send_signal(number)
        self.popen.communicate(timeout=30)
        return self.popen.returncode


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def start(real_url: str, run_id: str) -> Iterator[Start]:
    """Start workers of one run; all are ended with the test."""
    started: list[Process] = []

    def begin(module: str, *arguments: str) -> Process:
        started.append(Process(real_url, module, "--namespace", run_id, *arguments))
        return started[-1]

    yield begin
    for process in started:
        process.popen.kill()
        process.popen.communicate()
        process.errors.close()


def stats_of(url: str, run_id: str) -> redrb.StreamStats:
    with redrb.connect(url) as client:
        return task_stats(client, "sort", namespace=run_id, group="default")


def test_sigterm_ends_trainer_and_maker_with_nothing_leased(
    start: Start, real_url: str, run_id: str
) -> None:
    trainer = start("workers.trainer", "--target-reward", "2")
    maker = start("workers.maker")
    trainer.until("step", 3)
    assert trainer.end() == 0
    assert maker.end() == 0
    stats = stats_of(real_url, run_id)
    assert stats.ledger.acked >= 3 * 32
    assert stats.ledger.leased == 0
    assert stats.ledger.balanced


def test_makers_that_die_or_start_late_do_not_disturb_the_run(
    start: Start, real_url: str, run_id: str
) -> None:
    trainer = start("workers.trainer", "--target-reward", "2")
    doomed = start("workers.maker", "--worker", "doomed")
    trainer.until("step", 2)
    assert doomed.end(signal.SIGKILL) == -signal.SIGKILL
    late = start("workers.maker", "--worker", "late")
    late.until("put", 3)
    before = trainer.until("step")[0]["step"]
    assert trainer.until("step", 3)[-1]["step"] == before + 3
    assert trainer.end() == 0
    assert late.end() == 0
    assert stats_of(real_url, run_id).ledger.balanced


def test_a_trainer_that_was_killed_goes_on_from_the_published_weights(
    start: Start, real_url: str, run_id: str
) -> None:
    arguments = ("--target-reward", "2", "--lease-ms", "1000")
    first = start("workers.trainer", *arguments)
    maker = start("workers.maker")
    killed_at = first.until("step", 5)[-1]["weight_version"]
    first.end(signal.SIGKILL)
    second = start("workers.trainer", *arguments)
    evaluation = second.until("evaluation")[0]
    assert evaluation["step"] == 0
    assert evaluation["weight_version"] >= killed_at
    second.until("step", 5)
    assert second.end() == 0
    assert maker.end() == 0
    stats = stats_of(real_url, run_id)
    assert stats.ledger.dead == 0
    assert stats.ledger.balanced


def test_every_sample_carries_what_training_needs(start: Start, real_url: str, run_id: str) -> None:
    trainer = start("workers.trainer", "--steps", "1", "--target-reward", "2")
    maker = start("workers.maker", "--maker-steps", "2", "--worker", "maker-x")
    maker.until("put", 2)
    trainer.until("step", 1)
    assert maker.popen.wait(30) == 0
    assert trainer.popen.wait(30) == 0
    with redrb.connect(real_url) as client:
        stream = redrb.ExperienceStream(client, "sort", namespace=run_id)
        with stream, stream.take(32, timeout=10) as lease:
            groups, batch = lease.groups(), lease.batch()
    items = [item for group in groups for item in group]
    assert len({len(item.sequences) for item in items}) > 1  # prompts
    assert len({int(item.action_mask.sum()) for item in items}) > 1  # completions
    for group in groups:
        assert len(group) == 4
        assert len({item.group_id for item in group}) == 1
        for item in group:
            assert item.policy_version is not None
            assert item.tags["maker"] == "maker-x"
            assert item.extras["text"]
            for name in redrb.experience.records.STANDARD_FIELDS:
                assert getattr(item, name) is not None, name
    assert batch.kl.abs().sum() >= 0
    assert batch.advantages.shape == batch.action_mask.shape
    assert batch.values.abs().sum() >= 0
    assert set(batch.reward.tolist()) <= {0.0, 1.0}


@on_one_server
def test_a_maker_changes_weights_in_mid_generation(
    start: Start, real_url: str, run_id: str
) -> None:
    unbounded = ("--max-staleness", "-1")  # no trainer says how many groups it trains
    maker = start(
        "workers.maker", "--in-flight-updates", "--maker-steps", "3", "--prompts", "16", *unbounded
    )
    with redrb.connect(real_url) as client:
        model = ActorCritic()
        redrb.WeightPublisher(client, "sort-reference", namespace=run_id).publish(model.actor)
        trainer = Broadcast(client, run_id, "sort", [])
        while maker.popen.poll() is None:
            trainer.push({"actor": model.actor, "critic": model.critic}, fully=True)
        assert maker.popen.returncode == 0
        with redrb.ExperienceStream(client, "sort", namespace=run_id) as stream:
            items = [item for group in stream.take(48, timeout=10).groups() for item in group]
    mixed = 0
    for item in items:
        assert item.token_versions is not None
        versions = item.token_versions[item.action_mask.bool()].tolist()
        assert versions == sorted(versions)
        assert item.policy_version == versions[0] >= 1
        mixed += versions[0] < versions[-1]
    assert mixed > len(items) / 10


def test_a_maker_without_a_trainer_says_what_it_waits_for(real_url: str, run_id: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "workers.maker", "sorting"]
        + ["--namespace", run_id, "--weights-timeout", "0.3"],
        env=child_environment(without=PREFIX, REDRB_URL=real_url),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert "weights 'sort': no version" in done.stderr
    assert re.search(r"within \d+\.\d s; none is published yet", done.stderr)
    assert "Traceback" not in done.stderr


@on_one_server
def test_a_maker_that_waits_for_weights_ends_when_asked(start: Start) -> None:
    maker = start("workers.maker")
    maker.until("start")
    asked = time.monotonic()
    assert maker.end() == 0
    assert time.monotonic() - asked < 5
    assert maker.error_output() == ""


@on_one_server
def test_a_trainer_without_makers_says_how_long_it_waited(start: Start) -> None:
    trainer = start("workers.trainer", "--idle-timeout", "1.5", "--target-reward", "2")
    trainer.popen.communicate(timeout=60)
    assert trainer.popen.returncode == 1
    assert re.search(
        r"0 of 32 groups were waiting after (1\.[5-9]|2\.\d) s", trainer.error_output()
    )
    assert "Traceback" not in trainer.error_output()


@on_one_server
def test_a_trainer_without_makers_keeps_its_end(start: Start) -> None:
    trainer = start("workers.trainer", "--max-seconds", "1", "--target-reward", "2")
    trainer.popen.communicate(timeout=60)
    assert trainer.popen.returncode == 0
    assert "ends: 1 seconds are over, at weight version 1" in trainer.error_output()


@on_one_server
def test_a_second_trainer_takes_the_weights_over_and_the_first_says_so(
    start: Start, real_url: str, run_id: str
) -> None:
    first = start("workers.trainer", "--target-reward", "2")
    maker = start("workers.maker")
    first.until("step")
    second = start("workers.trainer", "--target-reward", "2", "--steps", "2")
    first.popen.communicate(timeout=60)
    assert first.popen.returncode == 1
    assert "another publisher of weights 'sort' was started" in first.error_output()
    assert "Traceback" not in first.error_output()
    second.popen.communicate(timeout=60)
    assert second.popen.returncode == 0
    assert "ends: 2 steps are done, at weight version" in second.error_output()
    assert maker.end() == 0
    assert stats_of(real_url, run_id).ledger.balanced


@on_one_server
def test_a_trainer_whose_target_is_reached_already_says_so(start: Start) -> None:
    first, maker = start("workers.trainer", "--target-reward", "0.01"), start("workers.maker")
    assert first.until("end")[0]["why"].startswith("held-out reward 0.")
    assert first.popen.wait(30) == 0
    assert maker.popen.wait(60) == 0
    second = start("workers.trainer", "--target-reward", "0.01")
    assert second.popen.wait(60) == 0
    assert "has reached the target 0.01 at weight version" in second.error_output()


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (["workers.trainer", "sorting", "--publish-every", "0"], "--publish-every"),
        (["workers.maker", "sorting", "--prompts", "0"], "--prompts"),
        (["workers.maker", "sorting", "--task", "a b"], "--task"),
        (["workers.maker", "sorting", "--metrics", "/dev/null/none"], "/dev/null/none"),
        (["redrb.cli", "demo", "--makers", "0"], "--makers"),
    ],
)
def test_a_setting_that_cannot_be_is_named(command: list[str], flag: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=child_environment(without=PREFIX, REDRB_URL="fake://settings"),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert flag in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


HELP = """
import runpy, sys
sys.argv = ["command", "--help"]
try:
    runpy.run_module({module!r}, run_name="__main__")
except SystemExit as end:
    assert not end.code
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("workers.maker", ("--url", "--group-size", "REDRB_KL_COEF")),
        ("workers.trainer", ("--groups", "--clip", "REDRB_TARGET_REWARD")),
        ("redrb.cli", ("demo", "server", "stats", "REDRB_URL")),
    ],
)
def test_help_is_complete_and_imports_no_torch(module: str, words: tuple[str, ...]) -> None:
    code = HELP.format(module=module)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    for word in words:
        assert word in done.stdout
