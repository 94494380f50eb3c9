"""slime's and miles' own tests, unchanged, on redrb: `make test-peers PEERS=folder`.

The folder holds checkouts of slime (github THUDM/slime) and miles (github radixark/miles). Nothing
of them is copied; packages that they import and their tests do not use are stand-ins.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CONTRACTS = "tests/plugin_contracts"

APART = {
    # compares the recycled sample with the object that was put: from Redis comes an equal one
    "miles": "not test_stale_group_recycled",
}


def run(project: str, tests: list[str | Path], *options: str, **variables: str) -> str:
    """Run tests in a checkout, whose files come before redrb's; returns their output."""
    folder = os.environ.get("PEERS")
    checkout = Path(folder or "", project).resolve()
    if not folder or not checkout.is_dir():
        pytest.skip(
            f"no checkout of {project}: make test-peers PEERS=folder, with folder/{project}"
        )
    paths = [checkout / CONTRACTS, checkout, HERE, HERE.parents[1]]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--noconftest", "-q"]
    command += ["-p", "peer_stand_ins", "-c", os.devnull, "--rootdir", checkout, "-W", "ignore"]
    result = subprocess.run(
        [*command, *options, *tests],
        cwd=checkout,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "REDRB_URL": "embedded://",
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("name", ["path_loading", "rollout", "generate", "runtime_hook"])
def test_slimes_contracts_of_plugins(name):
    run(
        "slime",
        [f"{CONTRACTS}/test_plugin_{name}_contracts.py"],
        SLIME_CONTRACT_DATA_SOURCE_PATH="redrb.compat.slime.RedrbDataSource",
        SLIME_CONTRACT_ROLLOUT_FUNCTION_PATH="redrb_slime.rollout",
        SLIME_CONTRACT_EVAL_FUNCTION_PATH="redrb_slime.rollout",
    )


def test_slimes_samples_and_prompts():
    assert "3 passed" in run("slime", [HERE / "slime_samples.py"])


def test_miles_asynchronous_rollout():
    tests = ["tests/fast/rollout/test_fully_async_rollout.py"]
    assert "20 passed" in run("miles", tests, "-p", "redrb_miles", "-k", APART["miles"])
