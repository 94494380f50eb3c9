"""What is not imported before it is needed: starts stay quick, and extras stay optional."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from redrb.environment import child_environment

STEPS: list[tuple[str, set[str]]] = [
    ("import redrb, redrb.weights", {"torch", "numpy", "redis"}),
    (
        "from redrb.cli import __main__ as cli; ended(cli.main, ['--help'])",
        {"torch", "numpy", "redis", "rich", "asyncio"},
    ),
    ("ended(cli.main, ['settings', 'sorting'])", {"torch"}),
    ("from redrb.cli.processes import maker; ended(maker.main, ['sorting', '--help'])", {"torch"}),
    ("import redrb.algorithms", {"transformers"}),
    (
        "import redrb.cli.processes.trainer, redrb.cli.processes.maker, redrb.train.callbacks",
        {"prometheus_client", "tensorboard", "wandb"},
    ),
    ("import redrb.recipe.maker, redrb.recipe.trainer", {"torch.distributed.tensor"}),
    ("import redrb.compat.transfer_queue.checkpoint", {"redrb.compat.transfer_queue.verl"}),
]
"""Statements of one program, each with modules that may not be loaded after it."""

BEGIN = """
import contextlib, io, json, sys
def ended(call, words):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        call(words)
"""


def test_modules_are_loaded_when_they_are_needed():
    program = BEGIN
    for statement, absent in STEPS:
        program += (
            f"{statement}\nprint(json.dumps([m for m in {sorted(absent)} if m in sys.modules]))\n"
        )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=child_environment(PYTHONPATH=str(Path(__file__).parents[2])),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = list(map(json.loads, done.stdout.splitlines()))
    found = {statement: names for (statement, _), names in zip(STEPS, loaded, strict=True)}
    assert {statement: names for statement, names in found.items() if names} == {}
