"""A data-parallel `DetachedTrainer` in real processes: killed and started again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import redrb
from tests import warm
from tests.integration.detached_rank import STEPS
from tests.samples import numbered
from tests.servers import programs

SCRIPT = Path(__file__).with_name("detached_rank.py")


@pytest.fixture
def scope() -> Iterator[ExitStack]:
    with ExitStack() as scope:
        yield scope


def run(
    scope: ExitStack,
    url: str,
    namespace: str,
    directory: Path,
    *,
    ack: str = "checkpoint",
    number: int = 0,
) -> list[tuple[int, list[dict[str, Any]], str]]:
    """Run both ranks; with a signal `number` rank 1 gets it in its fourth step.

    Returns status, lines and errors of each.
    """
    meeting = directory.parent / uuid.uuid4().hex
    ranks = [
        warm.Popen(
            [
                sys.executable,
                SCRIPT,
                *(url, namespace, str(rank), directory, meeting, ack),
                *(str(3 if rank and number else -1), str(number)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for rank in range(2)
    ]
    for rank in ranks:
        scope.callback(rank.kill)
    found = []
    for rank in ranks:
        output, errors = rank.communicate(timeout=240)
        found.append((rank.returncode, [json.loads(line) for line in output.splitlines()], errors))
    return found


def parts(lines: list[dict[str, Any]]) -> list[list[float]]:
    return [line["trained"] for line in lines if "trained" in line]


@pytest.mark.slow
@pytest.mark.parametrize("real_url", list(programs())[-1:], indirect=True)
def test_ranks_that_are_stopped_or_killed_go_on_at_the_same_step(
    real_url: str, namespace: str, scope: ExitStack, tmp_path: Path
) -> None:
    client = scope.enter_context(redrb.connect(real_url))

    def stream(name: str) -> redrb.ExperienceStream:
        opened = scope.enter_context(
            redrb.ExperienceStream(client, "shared", namespace=f"{namespace}-{name}")
        )
        opened.put_many([[numbered(n)] for n in range((STEPS + 2) * 8)])
        return opened

    def train(name: str, **options: Any) -> list[tuple[int, list[dict[str, Any]], str]]:
        return run(scope, real_url, f"{namespace}-{name}", tmp_path / name, **options)

    stream("whole")
    whole = train("whole")
    assert [status for status, _, _ in whole] == [0, 0], whole[0][2] + whole[1][2]
    assert whole[0][1][-1]["parameters"] == whole[1][1][-1]["parameters"]
    assert whole[0][1][-1]["version"] == STEPS

    # one rank is asked to end: both do, after the same step, and go on as if they had not
    stopped = stream("stopped")
    first = train("stopped", number=signal.SIGTERM)
    assert [status for status, _, _ in first] == [0, 0], first[0][2] + first[1][2]
    assert [len(parts(lines)) for _, lines, _ in first] == [4, 4]
    assert [lines[-1]["why"] for _, lines, _ in first] == ["", "SIGTERM"]
    second = train("stopped")
    for before, after, expected in zip(first, second, whole, strict=True):
        assert [*parts(before[1]), *parts(after[1])] == parts(expected[1])
        assert after[1][-1]["parameters"] == expected[1][-1]["parameters"]
    assert stopped.stats().ledger.acked == STEPS * 8

    # one rank is killed in its fourth step: the checkpoint is after two
    for ack in ("checkpoint", "step"):
        broken = stream(ack)
        first = train(ack, ack=ack, number=signal.SIGKILL)
        assert first[1][0] == -9
        assert first[0][0] == 1
        assert "Error" in first[0][2]
        second = train(ack, ack=ack)
        assert [status for status, _, _ in second] == [0, 0], second[0][2] + second[1][2]
        if ack == "checkpoint":  # batches after the checkpoint are trained again
            for after, expected in zip(second, whole, strict=True):
                assert parts(after[1]) == parts(expected[1])[2:]
                assert after[1][-1]["parameters"] == expected[1][-1]["parameters"]
        ledger = broken.stats().ledger
        assert ledger.balanced
        steps = STEPS if ack == "checkpoint" else STEPS + 1  # the third step is not trained again
        assert (ledger.acked, ledger.leased) == (steps * 8, 0)
