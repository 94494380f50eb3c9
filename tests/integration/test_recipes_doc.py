"""The recipe and the settings of docs/recipes.md, as they are printed."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch

from redrb import cli
from redrb.recipe import GRPORecipe
from redrb.recipe.loading import load
from redrb.recipe.prompts import prompt_batches

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()


def test_the_recipe_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (settings,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert len(text.strip().splitlines()) <= 32
    file = tmp_path / "documented_recipe.py"
    file.write_text(text)
    file.with_suffix(".toml").write_text(settings)
    assert cli.main(["settings", str(file), "--groups", "8", "--json"]) == 0
    rows = {row["name"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert (rows["digits"], rows["groups"], rows["group_size"]) == (5, 8, 16)

    torch.manual_seed(0)
    recipe = load(str(file)).recipe(digits=5)
    assert isinstance(recipe, GRPORecipe)
    models = recipe.models()
    optimizers = recipe.optimizers(models)
    maker = recipe.experience_maker(models, None)
    batches = prompt_batches(recipe, random.Random(0))
    options = recipe.generation(torch.Generator().manual_seed(0))
    for _ in range(60):
        metrics = recipe.step(models, optimizers, maker.make_experience(next(batches), **options))
    assert metrics["reward"] > 0.8
