"""`redrb demo`, the whole way: a policy learns from what makers put."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import redis

from tests.servers import Server, programs


def test_the_demo_learns_and_balances(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "redrb.cli", "demo", "--json", "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=115,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["reward_first"] < 0.5
    assert figures["reward_last"] >= 0.9
    assert figures["seconds"] < 110
    assert figures["ledger_balanced"] is True
    ledger = figures["ledger"]
    assert ledger["put"] == sum(count for name, count in ledger.items() if name != "put")
    assert figures["samples"] == 4 * ledger["acked"]
    assert figures["weight_versions"] > 10
    assert 0 < figures["staleness_mean"] <= figures["staleness_max"]
    assert (tmp_path / "run" / "curve.png").stat().st_size > 10_000
    assert set(figures) == {
        *("reward_first", "reward_last", "seconds", "samples", "samples_per_second"),
        *("staleness_mean", "staleness_max", "weight_versions", "ledger", "ledger_balanced"),
    }


def test_the_demo_leaves_nothing_on_a_server_of_yours(tmp_path: Path) -> None:
    server = Server(next(iter(programs().values())))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "redrb.cli", "demo", "--url", server.url]
            + ["--out", str(tmp_path), "--max-seconds", "2"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        with redis.Redis(port=server.port) as client:
            assert client.dbsize() == 0
    finally:
        server.close()
