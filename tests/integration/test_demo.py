"""`redrb demo`, the whole way: a policy learns from what makers put."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from redrb.environment import child_environment
from tests.servers import Server, programs


@pytest.mark.slow
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
    kinds = figures["weight_versions_by_kind"]
    assert sum(kinds.values()) == figures["weight_versions"]
    assert kinds["delta"] > kinds["full"] > 0
    assert 0 < figures["weights_bytes_sent"] < figures["weights_bytes_full"]
    assert 0 < figures["staleness_mean"] <= figures["staleness_max"]
    assert 0 <= figures["trainer_wait_share"] < 1
    assert 0 <= figures["maker_admission_share"] < 1
    assert ledger["expired"] == 0
    assert figures["staleness_max"] <= 2
    assert 0 <= figures["maker_room_share"] <= figures["maker_send_share"] < 1
    assert set(figures) == {
        *("reward_first", "reward_last", "samples", "samples_per_second"),
        *("seconds", "seconds_of_run"),
        *("staleness_mean", "staleness_max", "weight_versions", "ledger", "ledger_balanced"),
        *("trainer_wait_share", "maker_send_share", "maker_room_share", "maker_admission_share"),
        *("weight_versions_by_kind", "weights_bytes_full", "weights_bytes_sent", "faults"),
    }


def test_the_demo_leaves_nothing_on_a_server_of_yours_and_needs_no_variables(
    tmp_path: Path,
) -> None:
    for_other_runs = {
        "REDRB_URL": "redis://127.0.0.1:1",
        "REDRB_NAMESPACE": "other",
        "REDRB_TASK": "other",
        "REDRB_WEIGHTS": "other",
        "REDRB_WORKER": "other",
        "REDRB_STEPS": "1",
        "REDRB_PROMPTS": "0",
    }
    server = Server(next(iter(programs().values())))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "redrb.cli", "demo", "--url", server.url]
            + ["--out", str(tmp_path), "--target-reward", "0.2", "--makers", "1"],
            env=child_environment(**for_other_runs),
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        makers = [
            json.loads(line) for line in (tmp_path / "maker-1.jsonl").read_text().splitlines()
        ]
        assert makers[0]["worker"] == "maker-1"
        assert sum(event["event"] == "put" for event in makers) > 1
        with redis.Redis(port=server.port) as client:
            assert client.dbsize() == 0
    finally:
        server.close()


def test_an_output_directory_that_cannot_be_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "redrb.cli", "demo", "--out", "/dev/null/run"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert "--out /dev/null/run cannot be made" in done.stderr
    assert "Traceback" not in done.stderr
