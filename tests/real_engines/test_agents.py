"""The agent of `redrb new agent` with a real vLLM on a CPU: its reward rises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from redrb.environment import PREFIX, child_environment
from tests.real_engines.conftest import VLLM, RealVLLM
from tests.real_engines.test_gateway import BACKEND

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent"
STEPS = int(os.environ.get("ENGINES_STEPS", "40"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not VLLM, reason="needs VLLM: a folder with bin/vllm and model"),
]


def test_the_reward_of_a_new_agent_rises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").symlink_to(Path(VLLM).resolve() / "bin")
    subprocess.run([sys.executable, str(EXAMPLE / "small_model.py"), "model"], check=True)
    parser = ("--enable-auto-tool-choice", "--tool-call-parser=hermes")
    modes = ("--logprobs-mode=processed_logprobs", "--max-model-len=512")
    server = RealVLLM(tmp_path, tmp_path / "log", "--enable-scale-out", BACKEND, *parser, *modes)
    try:
        server.start()
        program = (sys.executable, "-m", "redrb.cli")
        subprocess.run([*program, "new", "agent", "sums.py"], check=True)
        words = ["run", "sums.py", "--settings", str(EXAMPLE / "on_cpu.toml"), "--makers", "1"]
        words += ["--model-name", str(server.model), "--engine-url", server.url, "--out", "out"]
        environment = child_environment(without=PREFIX)
        done = subprocess.run(
            [*program, *words, "--steps", str(STEPS)],
            env=environment,
            capture_output=True,
            text=True,
        )
    finally:
        server.close()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "out" / "trainer.jsonl").read_text().splitlines()
    steps = [each for each in map(json.loads, lines) if each["event"] == "step"]
    rewards = [each["reward"] for each in steps]
    print(f"rewards by step: {[round(each, 2) for each in rewards]}")
    assert len(rewards) == STEPS
    count = STEPS // 3
    assert sum(rewards[-count:]) / count > sum(rewards[:count]) / count + 0.08
    means = [each["importance_mean"] for each in steps]  # 1: log-probs are those of the policy
    assert all(abs(each - 1) < 0.05 for each in means), means
