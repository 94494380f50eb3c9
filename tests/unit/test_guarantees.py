"""docs/guarantees.md: a test that exists holds each promise."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "guarantees.md").read_text()


def test_each_promise_names_tests_that_exist() -> None:
    named = re.findall(r"`([a-z_0-9/]+\.py)::(test_[a-z0-9_]+)`", PAGE)
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "held by" not in line]
    assert len(named) > 50
    for row in rows:
        assert "::test_" in row, f"no test holds: {row}"
    for file, test in named:
        source = (TESTS / file).read_text()
        assert re.search(rf"^(async )?def {test}\(", source, re.MULTILINE), f"{file}::{test}"
