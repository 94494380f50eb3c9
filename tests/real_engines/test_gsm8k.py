"""The example gsm8k on a CPU with a real vLLM, each of whose parts is killed once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.real_engines.conftest import VLLM

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not VLLM, reason="needs VLLM: a folder with bin/vllm and model"),
]


@pytest.mark.parametrize("flags", [[], ["--lora-rank=8", "--learning-rate=1e-3"]])
def test_the_job_goes_on_whatever_is_killed(tmp_path: Path, flags: list[str]) -> None:
    out = tmp_path / "out"
    command = [sys.executable, EXAMPLE / "on_cpu.py", VLLM, "--out", out, "--steps", "10"]
    done = subprocess.run([*command, "--kills", *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr + (out / "run.log").read_text()[-3000:]
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == (0, 10)
    assert list(summary["killed"]) == ["vLLM", "maker", "trainer", "Redis"]
    if not flags:  # the layers that LoRA leaves as they are know nothing
        assert summary["reward_after"] > 0.1
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    versions = {
        json.loads(line)["policy_version"]
        for line in (out / "maker-1.jsonl").read_text().splitlines()
        if json.loads(line)["event"] == "put"
    }
    assert len(versions) > 3  # of the weights with which vLLM has sampled
