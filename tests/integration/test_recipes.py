"""Each recipe of redrb and each starter as real processes, for a few steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import redrb
from redrb import cli
from redrb.environment import PREFIX, child_environment
from redrb.stream.task.inspection import task_stats
from tests.servers import programs

SMALL = {
    "arithmetic": ("--supervised-steps", "5", "--width", "16", "--prompts-per-step", "8"),
    "multiturn": ("--supervised-steps", "5", "--width", "16", "--group-size", "4"),
    "cartpole": ("--group-size", "32", "--episodes", "1"),
    "vision": ("--width", "8", "--group-size", "4", "--held-out-images", "8"),
}
"""Flags that make a recipe quicker."""


@pytest.mark.parametrize("real_url", list(programs())[:1], indirect=True)
@pytest.mark.parametrize("name", [*SMALL, "grpo", "plain", "ppo"])
def test_maker_and_trainer_train_together(
    real_url: str, namespace: str, tmp_path: Path, name: str
) -> None:
    recipe = name
    if name not in SMALL:
        recipe = str(tmp_path / f"my_{name}.py")
        assert cli.main(["new", name, recipe]) == 0
    flags = [
        recipe,
        "--namespace",
        namespace,
        "--task",
        "job",
        "--groups",
        "4",
        *SMALL.get(name, ()),
    ]
    environment = child_environment(without=PREFIX, REDRB_URL=real_url)
    trainer, maker = (
        subprocess.Popen(
            [sys.executable, "-m", f"redrb.workers.{role}", *flags, *more],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for role, more in (
            ("trainer", ("--steps", "3", "--target-reward", "1e9", "--metrics", "-")),
            ("maker", ()),
        )
    )
    try:
        output, errors = trainer.communicate(timeout=100)
        assert trainer.returncode == 0, errors
        assert maker.communicate(timeout=60)[1] == ""  # it learns that the job is over
        assert maker.returncode == 0
    finally:
        for process in (trainer, maker):
            process.kill()
            process.communicate()
    events = [json.loads(line) for line in output.splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == [1, 2, 3]
    assert all(event["samples"] > 4 for event in steps)
    assert [event for event in events if event["event"] == "evaluation"][-1]["step"] == 3
    with redrb.connect(real_url) as client:
        stats = task_stats(client, "job", namespace=namespace, group="default")
    assert stats.ledger.acked == 3 * 4
    assert stats.ledger.balanced
