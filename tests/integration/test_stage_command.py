"""`redrb-stage`: it ends at SIGTERM while the next task is full, and refuses wrong arguments."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

import redrb
from redrb import ExperienceStream
from redrb.cli.processes.stage import main
from redrb.environment import PREFIX, child_environment
from tests import warm
from tests.contract.test_stage import score
from tests.samples import numbered

FUNCTION = "tests.contract.test_stage:score"


class Needy:
    """A class that cannot be made without arguments."""

    def __init__(self, model: str) -> None:
        self.model = model

    def __call__(self, group: object) -> object:
        return group


def test_a_mistyped_task_is_reported(real_url, namespace, capsys, monkeypatch):
    monkeypatch.setattr("redrb.train.stage.Stage.run", lambda _: None)
    monkeypatch.setenv("REDRB_URL", real_url)
    with (
        redrb.connect(real_url) as client,
        ExperienceStream(client, "rollouts", namespace=namespace),
    ):
        for task, warned in (("rolouts", True), ("rollouts", False)):
            assert main([FUNCTION, "--namespace", namespace, "--from", task, "--to", "b"]) == 0
            told = "Tasks with similar names: 'rollouts'" in capsys.readouterr().err
            assert told == warned


def test_sigterm_ends_a_stage_whose_next_task_is_full(real_url, namespace):
    environment = child_environment(
        without=PREFIX, REDRB_URL=real_url, REDRB_NAMESPACE=namespace, REDRB_FROM="rollouts"
    )
    with (
        redrb.connect(real_url) as client,
        ExperienceStream(client, "rollouts", namespace=namespace) as rollouts,
        ExperienceStream(client, "full", namespace=namespace, limit=1) as full,
    ):
        full.put(score([numbered(7)]))
        rollouts.put([numbered(1)])
        process = warm.Popen(
            [sys.executable, "-m", "workers.stage", FUNCTION]
            + ["--to", "full", "--stop-timeout", "2"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                while not full.stats().producers_waiting:
                    assert process.poll() is None
                process.send_signal(signal.SIGTERM)
                _, errors = process.communicate(timeout=20)  # seconds; it was more than 90
            finally:
                process.kill()
        assert process.returncode == 0, errors
        assert "its groups wait again: task 'full' of namespace" in errors
        assert rollouts.stats().ledger.waiting == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([FUNCTION, "--from", "a"], "--to TASK (or REDRB_TO) is missing"),
        ([f"{__name__}:Needy", "--from", "a", "--to", "b"], "needs arguments"),
        (["score", "--from", "a", "--to", "b"], "write MODULE:FUNCTION"),
        (["tests.samples:nothing", "--from", "a", "--to", "b"], "cannot be imported"),
    ],
)
def test_wrong_arguments_end_with_status_2(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
