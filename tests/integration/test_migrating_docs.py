"""Every block of code in docs/migrating.md, run as it is printed."""

from __future__ import annotations

import importlib.util
import re
import tomllib
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrating.md").read_text()
BLOCKS = re.findall(r"(?:<!-- needs (\w+) -->\n)?```python\n(.*?)```", PAGE, re.DOTALL)
PRINTED = {
    "DetachedReplayBuffer": "torch.Size([2, 9])\n",
    "RolloutReader": "1\ntorch.Size([2, 5])\n",
    "GRPOTrainer": "put=2, acked=2",
    "Accelerator": "put=5, acked=4",
    "task_buffer": "torch.Size([4, 3]) torch.Size([4, 1])\n" * 2,
    "queue.qsize": "torch.Size([2, 9]) [3, 3]\nLedger(put=1, acked=1",
}


@pytest.mark.parametrize("word", PRINTED)
def test_a_block_runs_as_printed(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    ((needed, block),) = [each for each in BLOCKS if word in each[1]]
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    with warnings.catch_warnings():
        if needed:  # other libraries warn of their own plans
            warnings.simplefilter("ignore")
        names: dict[str, object] = {"__name__": "__main__"}
        exec(compile(block, f"migrating.md, {word}", "exec"), names)
    assert PRINTED[word] in capsys.readouterr().out
    for name in ("buffer", "stream", "client"):
        if hasattr(names.get(name), "close"):
            names[name].close()


def test_each_block_is_run() -> None:
    assert len(BLOCKS) == len(PRINTED)


def test_what_is_to_be_installed_exists() -> None:
    """All commands in blocks of this page install an extra."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    commands = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    named = [
        re.match(r"pip install '\.\[(\w+)\]' +# in the clone", command) for command in commands
    ]
    assert [found and found[1] for found in named] == ["trl", "torchrl"]
    assert {"trl", "torchrl"} <= extras.keys()
