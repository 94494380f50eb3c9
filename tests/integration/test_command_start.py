"""Commands that need no tensors start quickly: none imports torch, and numpy only for groups."""

import json
import subprocess
import sys

import pytest
import torch

import redrb
from redrb import ExperienceStream, WeightPublisher
from redrb.environment import PREFIX, child_environment
from tests.samples import numbered
from tests.servers import programs

RUN_COMMANDS = """
import json, sys
from redrb.cli.__main__ import main
for words in json.loads(sys.argv[1]):
    try:
        status = main(words)
    except SystemExit as ended:
        status = ended.code
    heavy = [name for name in ("torch", "numpy") if name in sys.modules]
    print("ended:", *words[:2], status, *heavy)
"""
"""Runs commands; prints two words of each, its exit status, and heavy modules loaded by then."""


@pytest.mark.parametrize("real_url", list(programs())[:1], indirect=True)
def test_commands_without_tensors_import_no_torch(real_url, namespace, tmp_path):
    with redrb.connect(real_url) as client:
        ExperienceStream(client, "task", namespace=namespace).put(numbered(1))
        with WeightPublisher(client, "policy", namespace=namespace) as publisher:
            publisher.publish({"weight": torch.ones(3)})
    file = str(tmp_path / "file")
    expected = [
        (["--version"], 0),
        (["--help"], 0),
        (["stats", "task"], 0),
        (["ls", "--group", "default"], 0),
        (["set", "task", "limit=9"], 0),
        (["doctor", "task", "--over", "0.01"], 0),
        (["top", "--once"], 0),
        (["dashboard", "--host", "256.0.0.1", "--expose"], 2),
        (["save", "task", file], 0),
        (["resume", "again", file], 0),
        (["weights", "ls"], 0),
        (["weights", "show", "policy"], 0),
        (["weights", "show", "policy", "--tensors"], 0),
        (["weights", "rm", "policy"], 0),
        (["engine-weights", "http://127.0.0.1:1", "--weights", "policy", "--at-once", "0"], 2),
        (["exporter", "--once"], 0),
        (["inspect", "task", "--follow", "--count", "0"], 2),
        (["inspect", "task", "1"], "0 numpy"),
    ]
    commands = [
        words if words[0].startswith("-") else [*words, "--namespace", namespace, "--json"]
        for words, _ in expected
    ]
    completed = subprocess.run(
        [sys.executable, "-c", RUN_COMMANDS, json.dumps(commands)],
        env=child_environment(without=PREFIX, REDRB_URL=real_url),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    ends = [line for line in completed.stdout.splitlines() if line.startswith("ended:")]
    assert ends == [f"ended: {' '.join(words[:2])} {status}" for words, status in expected]
