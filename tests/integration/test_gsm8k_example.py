"""examples/gsm8k: its data, its recipe, and the files that start it elsewhere."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from redrb.cli import __main__ as cli
from redrb.recipe import character_tokenizer
from redrb.recipe.command_line import parse
from redrb.recipe.loading import load
from redrb.recipe.settings import read_file, settings_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k"
RECIPE = str(EXAMPLE / "recipe.py")
KNOWN = {f"REDRB_{name.upper()}" for name in settings_of(load(RECIPE)[0])} | {"REDRB_RECIPE"}


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    file = tmp_path / "problems.jsonl"
    subprocess.run([sys.executable, EXAMPLE / "data.py", "--generated", "200", file], check=True)
    return file


def test_generated_problems_have_right_answers(problems: Path) -> None:
    rows = [json.loads(line) for line in problems.read_text().splitlines()]
    assert len({row["question"] for row in rows}) == 200
    for row in rows:
        a, b = map(int, re.findall(r"\d+", row["question"]))
        assert row["answer"] == f"{a}+{b}={a + b}\n#### {a + b}"


def test_the_recipe_is_warmed_up_on_solutions_that_it_rewards(problems: Path) -> None:
    tokenizer = character_tokenizer("".join(sorted(set(problems.read_text()))) + "\\boxed{}+=?")
    tokenizer.chat_template = "{{ messages[0]['content'] }} "
    loaded: Any = load(RECIPE)[0]
    recipe = loaded(dataset=str(problems), instruction="", held_out_rows=40, warm_up=2)
    object.__setattr__(recipe, "tokenizer", tokenizer)
    assert (len(recipe.prompts()), len(recipe.held_out())) == (160, 40)
    tokens, labels = recipe.solved(recipe.prompts()[0])
    own = labels[labels != -100]
    assert torch.equal(tokens[-len(own) :], own)
    assert own[-1] == tokenizer.eos_token_id

    class Shown:
        text = recipe.decode(own)

        def __getitem__(self, key: str) -> Any:
            return recipe.prompts()[0][key]

    assert recipe.reward(Shown()) == 1.0


def test_the_page_about_real_models_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (EXAMPLE.parents[1] / "docs" / "how-to" / "real-model.md").read_text()
    [example] = re.findall(r"```python\n(.*?)\n```\n", page, re.DOTALL)
    exec(compile(example, "real-model.md", "exec"), {})
    monkeypatch.chdir(tmp_path)
    [command] = re.findall(r"^redrb (new .*)$", page, re.MULTILINE)
    assert cli.main(shlex.split(command)) == 0
    runs = re.findall(r"^redrb run (.*)$", page, re.MULTILINE)
    assert [words.split() for words in runs] == [["my_recipe.py", "--makers", "1"]]
    for flags in re.findall(r"^\| `(--[^`]*)` \|", page, re.MULTILINE):
        words = flags.split()
        if words[0].removeprefix("--") not in ("dataset", "reward", "engine"):
            assert parse("redrb-trainer", None, ["my_recipe.py", *words]).recipe


def test_the_settings_for_a_cpu_are_known() -> None:
    assert read_file(EXAMPLE / "on_cpu.toml", settings_of(load(RECIPE)[0]))["device"] == "cpu"


def test_the_services_of_compose_have_known_settings() -> None:
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (EXAMPLE / "compose.yml").read_text())
    services = yaml.safe_load(text)["services"]
    assert set(services) == {"redis", "data", "vllm", "maker", "trainer"}
    for name in ("maker", "trainer"):
        variables = {each for each in services[name]["environment"] if each.startswith("REDRB_")}
        assert variables <= KNOWN
        assert services[name]["depends_on"].keys() == {"redis", "data"}
    assert services["vllm"]["environment"].keys() >= {"REDRB_URL", "VLLM_SERVER_DEV_MODE"}
    assert '--weight-transfer-config={"backend":"redrb"}' in services["vllm"]["command"]
    assert services["vllm"]["shm_size"]  # the host cache keeps two versions
    assert "ports" not in services["vllm"]  # anyone who reaches it could replace its weights
