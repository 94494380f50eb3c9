"""The examples, run as a user runs them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import redrb
from tests import warm
from tests.servers import Server, programs

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("own_server", list(programs())[-1:], indirect=True)
def test_the_port_of_colossalais_examples_trains(own_server: Callable[..., Server]) -> None:
    done = warm.run(
        [sys.executable, EXAMPLES / "colossalai.py"],
        env={**os.environ, "REDRB_URL": own_server().url},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "split and batched again: 8 samples"
    assert lines[1] == "sampled: 8 samples, 0 batches left"
    assert any(line.startswith("trained, and sent weights up to version 5") for line in lines)
    assert any(line.startswith("made experience with weights up to version") for line in lines)


@pytest.mark.parametrize("own_server", list(programs())[-1:], indirect=True)
@pytest.mark.slow
def test_trls_trainer_learns_from_a_maker_in_another_process(
    own_server: Callable[..., Server],
) -> None:
    done = warm.run(
        [sys.executable, EXAMPLES / "trl_grpo.py"],
        env={**os.environ, "REDRB_URL": own_server().url, "STEPS": "15"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reward, ledger = done.stdout.splitlines()[-2:]
    first, last = (float(part.split()[0]) for part in reward.removeprefix("reward: ").split(", "))
    assert last > first + 0.1, reward  # it learns less where makers are slow
    assert "acked=60" in ledger


@pytest.mark.slow
@pytest.mark.parametrize("own_server", list(programs())[-1:], indirect=True)
def test_accelerates_ranks_end_together_when_the_groups_are_uneven(
    own_server: Callable[..., Server],
) -> None:
    url = own_server().url
    environment = {**os.environ, "REDRB_URL": url, "TIMEOUT": "2", "OMP_NUM_THREADS": "1"}
    example = [str(EXAMPLES / "accelerate_loop.py")]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *example]
    for arguments in ([*example, "maker"], launch):
        done = warm.run(
            [sys.executable, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    # the ranks share the output: the end of one's line may come after the next line
    ends = re.findall(r"rank \d: (\d+) steps, weight (-?\d+\.\d{6})", done.stdout)
    assert [steps for steps, _ in ends] == ["3", "3"], done.stdout
    assert ends[0] == ends[1]
    with redrb.connect(url) as client, redrb.ExperienceStream(client, "accelerate") as stream:
        ledger = stream.stats().ledger
    assert (ledger.acked, ledger.waiting, ledger.leased) == (20, 1, 0)  # 8, 8, and 4 of 5
