"""Pages of docs/reference say what the code says."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

import redrb
from redrb import errors, keys
from redrb.connection import url
from redrb.stream import ExperienceStream
from redrb.weights.wire import calls as stored
from tests import reference_pages
from tests.documents import ROOT
from tests.public_names import GOLDEN
from tests.reference_pages import REFERENCE, STREAM, VARIABLES, names_of


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    for optional in ("trl", "torchrl"):
        pytest.importorskip(optional)


def test_the_pages_are_those_that_the_code_makes():
    """`python -m tests.reference_pages` writes them anew."""
    made = reference_pages.pages()
    written = [*(REFERENCE / "api").glob("*.md"), *(REFERENCE / "commands").glob("*.md")]
    names = {page.relative_to(REFERENCE).as_posix() for page in written} | {"settings.md"}
    stale = {name for name in names if (REFERENCE / name).read_text() != made.get(name)}
    assert (stale, names ^ made.keys()) == (set(), set())


def test_each_public_class_and_function_is_on_a_page():
    listed = {
        name
        for page in (REFERENCE / "api").glob("*.md")
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)
    }
    shown = {id(_found(name)) for name in listed}
    golden = re.findall(r"^(redrb[\w.]+)", GOLDEN.read_text(), re.MULTILINE)
    missing = []
    for name in golden:
        value = _found(name)
        if (inspect.isclass(value) or inspect.isfunction(value)) and name.count(".") < 4:
            owner = _found(name.rpartition(".")[0])
            if not inspect.isclass(owner) and id(value) not in shown:
                missing.append(name)
    assert missing == []


def _found(name: str) -> object:
    """Return the module, or the member of one, of a dotted name; None if there is none."""
    try:
        return importlib.import_module(name)
    except ImportError:
        module, _, last = name.rpartition(".")
        return getattr(importlib.import_module(module), last, None) if _is_module(module) else None


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def test_documented_parameters_exist():
    wrong = []
    for page in reference_pages.API:
        for name in names_of(page):
            value = _found(name)
            members = vars(value).items() if inspect.isclass(value) else ()
            for each, function in ((name, value), *members):
                if not callable(function) or not _documented(function):
                    continue
                known = inspect.signature(function).parameters
                if any(other.kind is other.VAR_KEYWORD for other in known.values()):
                    continue  # its arguments are those of another call
                wrong += [
                    f"{name}, {each}: {parameter}"
                    for parameter in _documented(function)
                    if parameter not in known
                ]
    assert wrong == []


def _documented(function: object) -> list[str]:
    text = inspect.getdoc(function) or ""
    body = re.search(r"^Args:\n((?: +.*\n?|\n)*)", text, re.MULTILINE)
    text = re.sub(r"\n {8,}", " ", body[1]) if body else ""  # the rest of each description
    lines = re.findall(r"^    ([\w, ]+): ", text, re.MULTILINE)
    return [name.strip() for line in lines for name in line.split(",")]


def test_the_page_of_errors_has_cause_and_remedy_of_each():
    page = (REFERENCE / "errors.md").read_text()
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))
    raised = {
        name
        for name, error in vars(errors).items()
        if isinstance(error, type) and issubclass(error, errors.RedrbError)
    }
    assert set(sections) == raised
    for name, text in sections.items():
        assert re.search(r"\*\*Cause\.\*\* \S", text), name
        assert re.search(r"\*\*Remedy\.\*\* \S", text), name


def test_the_page_of_urls_has_each_scheme_and_option():
    page = (REFERENCE / "url.md").read_text()
    for scheme in url.SCHEMES:
        assert f"{scheme}://" in page
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    of_sentinels = {"sentinel_tls", "sentinel_username", "sentinel_password"}
    of_connect = set(inspect.signature(redrb.connect).parameters) - {"url"}
    assert listed == {*url.COMMON, *url.TCP, *url.TLS} | of_sentinels | of_connect


def test_the_code_reads_the_variables_of_the_page_of_settings():
    source = "".join(file.read_text() for file in (ROOT / "redrb").rglob("*.py"))
    for name in VARIABLES:
        last = name.removeprefix("REDRB_").lower()
        assert name in source or f'variable_of("{last}")' in source, name


def test_the_lists_of_keys_are_whole() -> None:
    """Scripts use the keys that `redrb/keys.py` lists, and the page describes these."""
    page = (REFERENCE / "keys.md").read_text()
    sections = dict(re.findall(r"^## Keys of (?:a )?(\w+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    listed = {
        section: re.findall(r"`([^` ]+)`", " ".join(re.findall(r"^\| (`.*?) \|", text, re.M)))
        for section, text in sections.items()
    }
    declared = {
        "task": _declared(keys.TASK_KEYS, keys.TASK_REST, {"notes": "group"}),
        "table": _declared(keys.TABLE_KEYS, keys.TABLE_REST, {"claim": "task"}),
        "weights": [*stored.KEYS, "chunk:<token>:<number>", "delta:<token>:<number>"],
    }
    for section, names in declared.items():
        assert sorted(listed[section]) == sorted(names), section
    known = {re.sub(r":.*", ":", name) for names in declared.values() for name in names}
    used = {
        found[1] + (":" if found[2] == "," else "")
        for file in (ROOT / "redrb" / "lua").rglob("*.lua")
        for found in re.finditer(r"\bkey\('(\w+)'(.)", file.read_text())
    }
    assert used - known == set()
    assert len(used) > 50
    for owner in (keys.TaskKeys, keys.TableKeys, keys.WeightKeys):
        names = {name for name, value in vars(owner).items() if isinstance(value, keys._Key)}
        assert names - known - {"none"} == set(), owner


def _declared(
    lists: dict[str, tuple[str, ...]], rest: tuple[str, ...], owners: dict[str, str]
) -> list[str]:
    """Return names of keys as the page writes them; `owners` has those of other names."""
    named = [
        name if owner in ("task", "table") else f"{name}:<{owners.get(owner, owner)}>"
        for owner, names in lists.items()
        for name in names
    ]
    return [*named, *rest]


def test_the_tables_of_the_stream_have_each_method_once() -> None:
    public = {name for name in dir(ExperienceStream) if not name.startswith("_")}
    listed = " ".join(STREAM.values()).split()
    assert sorted(listed) == sorted(
        name for name in public if inspect.getdoc(getattr(ExperienceStream, name))
    )
