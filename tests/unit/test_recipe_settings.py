"""Settings of recipes: declared in classes, and given by files, variables and flags."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pytest

from redrb.cli import __main__ as cli
from redrb.cli.settings import without_password
from redrb.errors import ConfigError
from redrb.recipe import GRPORecipe, option
from redrb.recipe.job_settings import JobSettings
from redrb.recipe.settings import owner_of, resolve, settings_of

RECIPE = '''
from redrb.recipe import GRPORecipe, option

class Sums(GRPORecipe):
    """Adds numbers."""
    group_size = 16
    digits: int = option(2, "digits of each number", least=1)
    def model(self): raise AssertionError("not for settings")
    def prompts(self): return []
    def reward(self, completion): return 0.0
'''


class Small(JobSettings):
    """Settings of a test."""

    threads = 2
    note: Any = None  # annotated, and no setting

    digits: int = option(2, "digits of each number", least=1)
    fast: bool = option(False, "be fast")
    rate = option(0.5, "a rate")

    @cached_property
    def loaded(self) -> list[int]:
        """Loaded once."""
        return [self.digits]


class Smaller(Small):
    """Settings of another test."""

    digits = 1
    rate = 1


def test_attributes_replace_defaults_and_add_settings() -> None:
    known = settings_of(Smaller)
    assert {"threads", "digits", "fast", "rate"} <= set(known)
    assert "note" not in known
    made = Smaller(fast=True)
    assert (made.threads, made.digits, made.fast, made.rate) == (2, 1, True, 1.0)
    assert isinstance(made.rate, float)
    assert known["digits"].metadata["help"] == "digits of each number"
    assert owner_of(Smaller, "threads") is Small
    assert made.loaded is made.loaded
    with pytest.raises(AttributeError):
        made.digits = 3
    with pytest.raises(ConfigError, match=r"--digits .* at least 1"):
        Smaller(digits=0)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ({"threads": "2"}, r"Bad.threads is '2': it must be an int"),
        ({"threads": True}, "must be an int"),
        ({"threads": 0}, "Bad.threads is 0: it must be at least 1"),
        ({"in_order": option(3, "x", most=2)}, "Bad.in_order is 3: it must be at most 2"),
        ({"weights": lambda _: None}, "Bad.weights is <function.*it must be a text.*name under"),
        ({"name": option(1, "x")}, "Bad.name cannot be a setting"),
        ({"help": option(1, "x")}, "Bad.help cannot be a setting"),
        ({"listed": option([], "x")}, "Bad.listed has the type"),
        ({"threads": option(1.0, "x")}, "Bad.threads has the type"),
        ({"max_stalenes": 3}, r"max_stalenes is no setting; did you mean max_staleness\? If"),
        ({"wieghts": "w"}, "did you mean weights"),
    ],
)
def test_a_wrong_default_names_class_and_setting(attribute: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        type("Bad", (JobSettings,), attribute)


def test_attributes_of_other_types_or_names_and_class_variables_are_ordinary_ones() -> None:
    class Own(Small):
        """Has attributes like settings."""

        tasks = ("a", "b")
        limits = (1, 2)
        batch_size = 8
        words = "a b"
        digit: ClassVar[int] = 3

    assert set(settings_of(Own)) == set(settings_of(Small))


def test_each_source_overrides_the_one_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "small.toml"
    file.write_text("digits = 3\nrate = 2\nlimit = 7\nfast = true\n")
    monkeypatch.setenv("REDRB_DIGITS", "4")
    monkeypatch.setenv("REDRB_FAST", "no")
    made, origins = resolve(Small, flags={"digits": 5}, file=file, worker="me")
    assert (made.digits, made.rate, made.limit, made.fast) == (5, 2.0, 7, False)
    assert (made.threads, made.worker) == (2, "me")
    assert (origins["digits"], origins["rate"]) == ("--digits", str(file))
    assert (origins["fast"], origins["threads"]) == ("REDRB_FAST", "recipe Small")
    assert origins["seed"] == "default"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("digts = 3", r"no setting 'digts'; did you mean .*digits"),
        ("digits = 'x'", "digits is 'x': it must be an int"),
        ("digits = 0", "digits is 0: it must be at least 1"),
        ("[digits]", "must be an int"),
        ("digits =", "is no TOML"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "small.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(Small, flags={}, file=file)
    assert str(file) in str(caught.value)
    assert "?." not in str(caught.value)


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REDRB_DIGITS", "many")
    with pytest.raises(ConfigError, match="REDRB_DIGITS is 'many': it must be of type int"):
        resolve(Small, flags={})
    monkeypatch.delenv("REDRB_DIGITS")
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        resolve(Small, flags={}, file=tmp_path / "none.toml")


def test_the_command_shows_each_value_and_its_origin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe = tmp_path / "shown_sums.py"
    recipe.write_text(RECIPE)
    recipe.with_suffix(".toml").write_text("groups = 9\n")
    monkeypatch.setenv("REDRB_URL", "redis://me:secret@host:6379/0")
    assert cli.main(["settings", str(recipe), "--digits", "3", "--json"]) == 0
    printed = capsys.readouterr().out
    rows = {row["name"]: (row["value"], row["origin"]) for row in json.loads(printed)}
    assert rows["digits"] == (3, "--digits")
    assert rows["groups"] == (9, str(recipe.with_suffix(".toml")))
    assert rows["group_size"] == (16, "recipe Sums")
    assert rows["clip"] == (0.2, "default")
    assert rows["url"] == ("redis://me:***@host:6379/0", "REDRB_URL")
    assert "secret" not in printed
    assert cli.main(["settings", str(recipe)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:3] == ["group_size", "16", "recipe"] for line in lines)
    monkeypatch.setenv("REDRB_RECIPE", str(recipe))
    assert cli.main(["settings", "--digits", "0"]) == 2
    assert "--digits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@host", "redis://:***@host"),
        ("redis://host?password=secret&a=b", "redis://host?password=***&a=b"),
    ],
)
def test_passwords_are_hidden(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_a_grpo_recipe_needs_only_three_methods() -> None:
    assert set(GRPORecipe.missing()) == {"model", "prompts", "reward"}
