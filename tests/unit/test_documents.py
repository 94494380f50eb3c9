"""Documents name tests, findings and columns that exist."""

import re
from pathlib import Path

import pytest

from redrb.cli.__main__ import main
from redrb.watch.doctor.server_fixes import FAULTS
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
