"""`torchrun` of the trainer's command: two ranks train one recipe, replicated and sharded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import redrb
from redrb.environment import PREFIX, child_environment
from redrb.stream.task.lookup import task_stats
from tests import warm
from tests.servers import programs

GROUPS = 4

FLAGS = {
    "shard": ("--shard", "--micro-batch-size", "16", "--truncated-importance", "2"),
    "replicate": ("--mixed-precision", "bf16", "--gradient-checkpointing"),
}


@pytest.mark.parametrize("real_url", list(programs())[:1], indirect=True)
@pytest.mark.parametrize("mode", ["shard", pytest.param("replicate", marks=pytest.mark.slow)])
def test_two_ranks_train_a_recipe(real_url: str, namespace: str, tmp_path: Path, mode: str) -> None:
    flags = ["arithmetic", "--namespace", namespace, "--device", "cpu"]
    flags += ["--supervised-steps", "5", "--width", "16", "--prompts-per-step", "8"]
    training = ["--steps", "2", "--groups", str(GROUPS), "--target-reward", "1e9"]
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = child_environment(without=PREFIX, REDRB_URL=real_url, OMP_NUM_THREADS="1")
    log = tmp_path / "metrics"
    commands = [
        [*ranks, "-m", "redrb.cli.processes.trainer", *flags, *training, *FLAGS[mode]]
        + ["--metrics", str(log)],
        [sys.executable, "-m", "redrb.cli.processes.maker", *flags],
    ]
    trainer, maker = (
        warm.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for command in commands
    )
    try:
        errors = trainer.communicate(timeout=240)[1]
        assert trainer.returncode == 0, errors
        said = maker.communicate(timeout=120)[1].splitlines()
        assert "trainer 'arithmetic' has ended the job: 2 steps are done" in said[-1], said
        # where the first weights come late, it has also said that it waits for them
        waits = said[1:-1]
        assert all("waiting for weights 'arithmetic'" in line for line in waits), waits
        assert maker.returncode == 0
    finally:
        trainer.terminate()  # which ends its ranks
        trainer.communicate(timeout=120)
        maker.kill()
        maker.communicate()
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2]
    assert [event["step"] for event in events if event["event"] == "evaluation"] == [0, 2]
    with redrb.connect(real_url) as client:
        stats = task_stats(client, "arithmetic", namespace=namespace, group="default")
    assert stats.ledger.acked == 2 * 2 * GROUPS
    assert stats.ledger.balanced
