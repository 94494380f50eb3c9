"""Recipes from files and modules, and what is said about those that cannot be loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from redrb.cli import __main__ as cli
from redrb.errors import ConfigError
from redrb.recipe.command_line import parse
from redrb.recipe.loading import load, shipped
from redrb.recipe.recipe import Recipe

ONE = """
from redrb.recipe import GRPORecipe

class {name}(GRPORecipe):
    def model(self): ...
    def prompts(self): return []
    def reward(self, completion): return 0.0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder; the path of imports is as before afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_file_beside_its_modules_and_settings(folder: Path) -> None:
    (folder / "beside_it.py").write_text("VALUE = 1")
    file = folder / "one_recipe.py"
    file.write_text("from beside_it import VALUE" + ONE.format(name="One"))
    found, source = load(str(file))
    assert (found.__name__, source) == ("One", file)
    assert parse("redrb-maker", None, [str(file)]).recipe.steps == 0
    (folder / "one_recipe.toml").write_text("steps = 7")
    assert parse("redrb-maker", None, [f"{file}:One"]).recipe.steps == 7


def test_a_module_in_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    package = folder / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "jobs.py").write_text(ONE.format(name="One") + ONE.format(name="Two"))
    assert load("some_package.jobs:Two")[0].__name__ == "Two"
    with pytest.raises(ConfigError, match=r"several recipes: name one, .*jobs:One or .*jobs:Two"):
        load("some_package.jobs")


def test_a_base_class_in_the_same_file_is_not_the_recipe(folder: Path) -> None:
    file = folder / "based_recipe.py"
    file.write_text(ONE.format(name="Base") + "\nclass Last(Base):\n    groups = 4\n")
    assert load(str(file))[0].__name__ == "Last"


def test_a_file_with_the_name_of_a_loaded_module(folder: Path) -> None:
    file = folder / "json.py"
    file.write_text(ONE.format(name="One"))
    before = sys.modules["json"]
    assert load(str(file))[0].__name__ == "One"
    assert sys.modules["json"] is before


@pytest.mark.parametrize("name", shipped())
def test_recipes_of_redrb(name: str) -> None:
    found, _ = load(name)
    assert issubclass(found, Recipe)
    found()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no recipe: write a class"),
        ("import nothing_like_it", "(?s)cannot be imported:.*wrong_recipe.py.*ModuleNotFoundError"),
        ("def f():\n    1 / 0\nf()", "(?s)line 2, in f.*ZeroDivisionError"),
        ("class", "(?s)cannot be imported:.*SyntaxError"),
        (ONE.format(name="A").replace("reward", "score"), "A lacks reward"),
        ("from redrb.recipe import GRPORecipe\nclass A(GRPORecipe): threads = 0", "A.threads is 0"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(folder: Path, text: str, message: str) -> None:
    file = folder / "wrong_recipe.py"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(str(file))
    assert "redrb/recipe/loading.py" not in str(caught.value)


def test_a_missing_extra_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [WithoutTransformers(), *sys.meta_path])
    file = folder / "lacking_recipe.py"
    monkeypatch.setattr("redrb.cli.new.find_spec", lambda _name: None)
    assert cli.main(["new", "grpo", str(file)]) == 0
    assert "pip install 'gymnasium>=" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="transformers is not installed: pip install "):
        load(str(file))


class WithoutTransformers:
    """An environment in which transformers is not installed."""

    def find_spec(self, name: str, *_arguments: object) -> None:
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.py", "there is no recipe missing.py: no such file"),
        ("./sorting.py", "did you mean sorting"),
        ("sortin", "(?s)no recipe 'sortin'.*did you mean sorting"),
        ("sorting:Other", "sorting has no recipe 'Other'; it has Sorting"),
    ],
)
def test_a_name_without_a_recipe(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(name)


@pytest.mark.parametrize("kind", ["grpo", "ppo", "plain"])
def test_new_writes_a_recipe_once(
    folder: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    file = folder / f"my_{kind}.py"
    assert cli.main(["new", kind, str(file)]) == 0
    assert load(str(file))[0].__name__ == f"My{kind.capitalize()}"  # names the run's folder
    assert "redrb run" in capsys.readouterr().out
    assert cli.main(["new", kind, str(file)]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(("stem", "name"), [("recipe", "RecipeJob"), ("2nd", "MyRecipe")])
def test_new_names_the_class_so_that_it_loads(folder: Path, stem: str, name: str) -> None:
    file = folder / f"{stem}.py"
    assert cli.main(["new", "plain", str(file)]) == 0
    assert load(str(file))[0].__name__ == name
