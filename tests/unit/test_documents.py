"""Documents name tests, findings and columns that exist."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from redrb import recipe
from redrb.cli.__main__ import main
from redrb.recipe import EpisodeRecipe, GRPORecipe
from redrb.watch.doctor.server_fixes import FAULTS
from tests.documents import blocks, name_of, pages
from tests.finding_kinds import finding_kinds

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("page", "least"), [("reference/guarantees", 50), ("reference/security", 10)]
)
def test_each_promise_names_tests_that_exist(page, least):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    named = re.findall(r"`(?:tests/)?([a-z_0-9/]+\.py)::(test_[a-z0-9_]+)`", text)
    assert len(named) > least
    for file, test in named:
        source = (ROOT / "tests" / file).read_text()
        assert re.search(rf"^(async )?def {test}\(", source, re.MULTILINE), f"{file}::{test}"
    rows = [line for line in text.splitlines() if line.startswith("| ") and "held by" not in line]
    unheld = [row for row in rows if "::test_" not in row]
    assert page != "reference/guarantees" or unheld == [], "no test holds these"


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_trainers_send_their_first_weights_before_they_fit(page):
    """Makers with `sync_models_from_trainers` wait for them."""
    for block in blocks(page):
        before, fits, _ = block.text.partition("trainer.fit(")
        assert not fits or "trainer.sync_models_to_remote_makers()" in before, block.text


def test_the_counterparts_of_coati_are_settings_methods_or_metrics():
    text = (ROOT / "docs/how-to/coming-from-coati.md").read_text()
    table = text.partition("### What corresponds to what")[2].partition("### What does not")[0]
    rows = re.findall(r"^\| `.*? \| (.*) \|$", table, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z]+(?:_[a-z]+)*)(?:=[^`]*)?`", row)}
    metrics = (ROOT / "docs/reference/algorithms.md").read_text().partition("## Metrics")[2]
    values = {"sglang", "vllm", "local", "token", "sequence"}
    known = {*dir(GRPORecipe), *dir(EpisodeRecipe), *dir(recipe), *re.findall(r"`(\w+)`", metrics)}
    assert len(named) > 30
    assert named - known - values - {field.name for field in fields(GRPORecipe)} == set()


def test_the_page_of_doctor_lists_every_code():
    row = re.compile(r"^\| `([a-z-]+)` \| (\w+) \| (yes|) \| (.+) \| (.+) \|$", re.M)
    rows = row.findall((ROOT / "docs" / "reference" / "findings.md").read_text("utf-8"))
    listed = [(code, severity, bool(repairs)) for code, severity, repairs, _, _ in rows]
    kinds = finding_kinds("state", "doctor")
    assert set(listed) == {
        (code, kind["severity"], kind.get("repairs", False)) for code, kind in kinds.items()
    }
    assert len(listed) == len(set(listed))


def test_the_page_of_findings_has_every_security_fix():
    page = (ROOT / "docs" / "reference" / "findings.md").read_text("utf-8")
    table = [line.split(" | ") for line in page.splitlines() if line.startswith("| CVE-")]
    for kind, column in (("redis", 1), ("valkey", 2)):
        for fault in FAULTS[kind]:
            [row] = [row for row in table if fault.number.split()[0] in row[0]]
            versions = [f"{major}.{minor}.{fix}" for (major, minor), fix in fault.fixed.items()]
            assert row[column].removesuffix(" |").split(", ") == versions


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("put", "default: all that are there"),
        ("rm", "Delete all versions of weights, without asking. A trainer that still publishes"),
        ("get", "Exit status: 0 when the command has done its work; 2 when an argument is wrong"),
    ],
)
def test_help_of_weights_explains_what_is_done(command, words, capsys):
    with pytest.raises(SystemExit):
        main(["weights", command, "--help"])
    assert words in " ".join(capsys.readouterr().out.split())
