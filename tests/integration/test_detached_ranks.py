"""A data-parallel `DetachedTrainer` in real processes: killed and started again."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import redrb
from tests.integration.detached_rank import STEPS
from tests.samples import numbered
from tests.servers import programs

SCRIPT = Path(__file__).with_name("detached_rank.py")


@pytest.fixture
def scope() -> Iterator[ExitStack]:
    with ExitStack() as scope:
        yield scope


def run(
    scope: ExitStack, url: str, namespace: str, directory: Path, *, die_at: int = -1
) -> list[tuple[int, list[dict[str, Any]], str]]:
    """Run both ranks, of which rank 1 may die; return status, lines and errors of each."""
    meeting = directory.parent / uuid.uuid4().hex
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                SCRIPT,
                *(url, namespace, str(rank), directory, meeting, str(die_at if rank else -1)),
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
        told, errors = rank.communicate(timeout=90)
        found.append((rank.returncode, [json.loads(line) for line in told.splitlines()], errors))
    return found


def parts(lines: list[dict[str, Any]]) -> list[list[float]]:
    return [line["trained"] for line in lines if "trained" in line]


@pytest.mark.parametrize("real_url", list(programs())[-1:], indirect=True)
def test_a_killed_rank_and_a_restart_change_nothing(
    real_url: str, namespace: str, scope: ExitStack, tmp_path: Path
) -> None:
    spaces = {name: f"{namespace}-{name}" for name in ("whole", "broken")}
    client = scope.enter_context(redrb.connect(real_url))
    streams = {
        name: scope.enter_context(redrb.ExperienceStream(client, "shared", namespace=space))
        for name, space in spaces.items()
    }
    for stream in streams.values():
        stream.put_many([[numbered(n)] for n in range(STEPS * 8)])
    whole = run(scope, real_url, spaces["whole"], tmp_path / "whole")
    assert [status for status, _, _ in whole] == [0, 0], whole[0][2] + whole[1][2]
    assert whole[0][1][-1]["parameters"] == whole[1][1][-1]["parameters"]
    assert whole[0][1][-1]["version"] == STEPS

    broken = run(scope, real_url, spaces["broken"], tmp_path / "broken", die_at=3)
    assert broken[1][0] == -9
    assert broken[0][0] == 1
    assert "Error" in broken[0][2]
    again = run(scope, real_url, spaces["broken"], tmp_path / "broken")
    assert [status for status, _, _ in again] == [0, 0], again[0][2] + again[1][2]
    for rank in range(2):
        before, after = parts(broken[rank][1]), parts(again[rank][1])
        assert [*before[: STEPS - len(after)], *after] == parts(whole[rank][1])
        assert again[rank][1][-1]["parameters"] == whole[rank][1][-1]["parameters"]
    for stream in streams.values():
        ledger = stream.stats().ledger
        assert ledger.balanced
        assert (ledger.acked, ledger.leased, ledger.waiting) == (STEPS * 8, 0, 0)
