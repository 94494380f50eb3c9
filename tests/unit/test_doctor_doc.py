"""docs/doctor.md lists every finding, with the severity and the repair that the code gives it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.finding_kinds import finding_kinds

PAGE = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text("utf-8")
ROW = re.compile(r"^\| `([a-z-]+)` \| (\w+) \| (yes|) \| (.+) \| (.+) \|$", re.M)


def test_the_page_lists_every_code() -> None:
    listed = [
        (code, severity, bool(repairs)) for code, severity, repairs, _, _ in ROW.findall(PAGE)
    ]
    kinds = finding_kinds("redrb.state.findings", "redrb.doctor")
    known = {(kind.code, kind.severity, kind.repairs) for kind in kinds}
    assert set(listed) == known
    assert len(listed) == len(kinds)
