"""Extras: commands that install them, although no package index has redrb."""

import re
import shlex
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from redrb import ConfigError
from redrb.checks import install_command, require_package

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SOURCES = [*(ROOT / "redrb").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").iterdir()]
TEXTS = [(path, path.read_text()) for path in (*SOURCES, *PAGES) if path.is_file()]


def test_a_library_that_is_missing_is_named_with_the_command_that_installs_it():
    require_package("torch", extra="trl")
    with pytest.raises(ConfigError, match="no_such_library is not installed: pip install ") as told:
        require_package("no_such_library", extra="trl")
    assert told.value.args[0].endswith(f": {install_command('trl')}.")


def test_messages_name_the_packages_of_each_extra_in_use():
    called = r"(?:install_command\(|require_package\([^)]*extra=)[\"'](\w+)[\"']"
    used = {extra for _, text in TEXTS for extra in re.findall(called, text)}
    assert {"trl", "recipes", "dashboard", "metrics"} <= used
    for extra in used:
        program, command, *packages = shlex.split(install_command(extra))
        assert (program, command) == ("pip", "install")
        assert set(map(Requirement, packages)) == set(map(Requirement, EXTRAS[extra]))


def test_a_redrb_that_is_not_installed_names_its_clone(monkeypatch):
    def none(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", none)
    assert install_command("trl") == "pip install '.[trl]' in the clone of redrb"


def test_no_command_asks_a_package_index_for_redrb():
    asks = re.compile(r"install (?:-\S+ )*['\"]?redrb\[.*|pip3? install (?:-\S+ )*['\"]?redrb\b.*")
    assert [f"{path}: {found}" for path, text in TEXTS for found in asks.findall(text)] == []


def test_commands_of_documents_name_extras_that_exist():
    names = [
        extra
        for _, text in TEXTS
        for found in re.findall(r"'\.\[([\w,]+)\]'|\.whl\)\[([\w,]+)\]", text)
        for extra in "".join(found).split(",")
    ]
    assert len(names) > 12
    assert set(names) <= EXTRAS.keys()
