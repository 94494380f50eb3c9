"""A trainer that holds a lease for each step until its checkpoint is killed: nothing is lost."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path

import pytest

import redrb
from tests import warm
from tests.audit import audit
from tests.faults.checkpoint_trainer import BATCH, STEPS
from tests.samples import numbered


def train(url: str, namespace: str, directory: Path, dies_at: int, name: str) -> int:
    """Run a trainer in a process of its own; returns its exit status."""
    arguments = [url, namespace, str(directory), str(dies_at), name]
    command = [sys.executable, "-m", "tests.faults.checkpoint_trainer", *arguments]
    return warm.run(command, check=False, timeout=120).returncode


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("trainer_0", 0),
        *(pytest.param("trainer_0", n, marks=pytest.mark.slow) for n in range(1, 10)),
        *(pytest.param("another", n, marks=pytest.mark.slow) for n in range(10)),
    ],
)
def test_all_samples_of_a_trainer_killed_before_its_checkpoint_are_trained(
    real_url, namespace, tmp_path, seed, name
):
    """A trainer of the same name begins again at once, another one after the lease has ended."""
    dies_at = random.Random(f"{seed}{name}").randrange(35, STEPS)
    with redrb.connect(real_url) as client:
        stream = redrb.ExperienceStream(client, "shared", namespace=namespace)
        stream.put_many([[numbered(number)] for number in range(STEPS * BATCH)])
        died = train(real_url, namespace, tmp_path / "first", dies_at, "trainer_0")
        assert died == -signal.SIGKILL
        assert stream.stats().ledger.leased >= dies_at * BATCH
        assert train(real_url, namespace, tmp_path / "second", STEPS + 1, name) == 0
        ledger = stream.stats().ledger
        assert (ledger.acked, ledger.leased, ledger.waiting) == (STEPS * BATCH, 0, 0)
        audit(stream)
        stream.close()
