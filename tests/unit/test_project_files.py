"""Files of the project beside its code: package data, workflows, addresses, the changelog."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DECISIONS = ROOT / "docs" / "contributing" / "decisions"


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_the_wheel_has_every_file_of_the_package():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["redrb"]
    data = {path for pattern in patterns for path in (ROOT / "redrb").glob(pattern)}
    others = {".py", ".c", ".h"}  # modules, and what setup.py names
    assert [
        path for path in tracked("redrb") if path.suffix not in others and path not in data
    ] == []


def test_the_address_of_the_repository_is_that_of_the_project():
    home = PROJECT["project"]["urls"]["Repository"]
    texts = tracked("*.md", "*.toml", "*.yml", "*.py", "*.ipynb")
    found = {
        (path.name, address)
        for path in texts
        for address in re.findall(r"https://github\.com/[\w.-]+/redrb\b", path.read_text())
    }
    assert len(found) > 3
    assert {address for _, address in found} == {home}, found


def test_the_changelog_begins_with_the_version_of_the_project():
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == PROJECT["project"]["version"]


@pytest.mark.parametrize("name", ["AGENTS.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_of_pages_for_contributors_lead_to_files(name):
    targets = re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text())
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_each_decision_asks_its_question_first_and_is_listed():
    pages = {page.name for page in DECISIONS.glob("*.md")} - {"README.md"}
    listed = set(re.findall(r"\]\((.+?)\)", (DECISIONS / "README.md").read_text()))
    assert listed == pages
    first = {(DECISIONS / name).read_text().partition("\n")[0] for name in pages}
    assert [line for line in first if not re.fullmatch(r"# .+\?", line)] == []


def test_workflows_run_what_developers_run_on_each_supported_python():
    jobs = {path.stem: yaml.safe_load(path.read_text())["jobs"] for path in WORKFLOWS}
    steps = {
        name: [step for job in of_name.values() for step in job["steps"]]
        for name, of_name in jobs.items()
    }
    commands = {name: {step.get("run") for step in each} for name, each in steps.items()}
    assert ".ci/run" in commands["tests"]
    assert "make docs" in commands["site"]
    assert "make wheel" in commands["wheels"]
    assert "make test-${{ matrix.packages }}" in commands["packages"]
    run = [step.get("uses", step.get("run")) for step in steps["tests"]]
    assert run.index("azure/setup-kubectl@v4") < run.index(".ci/run")
    packages = jobs["packages"]["tests"]["strategy"]["matrix"]["packages"]
    assert packages == ["newest", "oldest", "agents"]
    used = {step["uses"] for each in steps.values() for step in each if "uses" in step}
    assert [each for each in used if not re.fullmatch(r"[\w/-]+@(v\d+|release/v\d+)", each)] == []
    versions = jobs["tests"]["tests"]["strategy"]["matrix"]["python"]
    classifiers = PROJECT["project"]["classifiers"]
    assert versions == [each.split(" :: ")[-1] for each in classifiers if ":: Python :: 3." in each]
    built = PROJECT["tool"]["cibuildwheel"]["build"].split()
    assert built == [f"cp{version.replace('.', '')}-*" for version in versions]


def locked() -> dict[str, set[str]]:
    """Return the versions of each package that `constraints.txt` names: for some, one by Python."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.partition(";")[0].strip().split("==")
            found.setdefault(canonicalize_name(name), set()).add(version)
    return found


def test_every_package_that_make_installs_is_locked():
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"]]
    names = {canonicalize_name(Requirement(each).name) for each in chain(wanted, *extras)}
    assert names - locked().keys() == {"redrb"}
    made = re.findall(r"\$\(INSTALL\) (?!-e)([\w-]+)", (ROOT / "Makefile").read_text())
    assert made
    assert set(made) <= locked().keys()


@pytest.mark.skipif(
    Path(sys.prefix) != ROOT / ".venv", reason="this is not the environment that make has made"
)
def test_locked_packages_have_the_locked_versions():
    of_venv = {"pip", "setuptools"}
    other = {
        name: each.version
        for each in distributions()
        if (name := canonicalize_name(each.metadata["Name"])) in locked().keys() - of_venv
        and each.version.partition("+")[0] not in locked()[name]
    }
    assert other == {}
