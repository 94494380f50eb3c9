"""The recipe, the settings and the commands of docs/recipes.md, as they are printed."""

from __future__ import annotations

import json
import random
import re
import shlex
import tomllib
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch.distributed.run import get_args_parser

from redrb.cli import __main__ as cli
from redrb.recipe import GRPORecipe
from redrb.recipe.command_line import parse
from redrb.recipe.loading import load
from redrb.recipe.prompts import endless

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text()


def block(language: str) -> str:
    """Return the page's one block of a language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


def test_the_recipe_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, settings = block("python"), block("toml")
    assert len(text.strip().splitlines()) <= 32
    file = tmp_path / "documented_recipe.py"
    file.write_text(text)
    file.with_suffix(".toml").write_text(settings)
    assert cli.main(["settings", str(file), "--groups", "8", "--json"]) == 0
    rows = {row["name"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert (rows["digits"], rows["groups"], rows["group_size"]) == (5, 8, 16)

    torch.manual_seed(0)
    recipe = load(str(file))[0](digits=5)
    assert isinstance(recipe, GRPORecipe)
    models = recipe.models()
    optimizers = recipe.optimizers(models)
    maker = recipe.experience_maker(models, None)
    prompts = endless(recipe, random.Random(0))
    options = recipe.generation(torch.Generator().manual_seed(0))
    for _ in range(60):
        batch = list(islice(prompts, recipe.prompts_per_step))
        metrics = recipe.step(models, optimizers, maker.make_experience(batch, **options))
    assert metrics["reward"] > 0.8


def test_the_commands_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """test_workers.py and test_recipe_ranks.py run the same commands with other recipes."""
    monkeypatch.chdir(tmp_path)
    Path("my_recipe.py").write_text(block("python"))
    programs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    groups = []
    for line in block("sh").splitlines():
        program, *words = shlex.split(line, comments=True)
        if program == "export":
            monkeypatch.setenv(*words[0].split("=", 1))
            continue
        if program == "torchrun":
            launch = get_args_parser().parse_args(words)
            assert (launch.nproc_per_node, launch.module) == ("2", True)
            program, words = launch.training_script, launch.training_script_args
            assert f"{program}:run" == programs["redrb-trainer"]
        else:
            assert program in programs
        recipe = parse(program, None, words).recipe
        assert recipe.url == "redis://host:6379/0"
        groups.append(recipe.groups)
    assert groups == [32, 32, 16, 32]
