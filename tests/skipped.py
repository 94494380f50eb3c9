"""The line at the end of a run that names the programs without which tests were skipped."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pytest

from tests.tools import ABSENT, PACKAGES, install


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Name the programs without which tests were skipped, after all else."""
    yield
    skipped = terminalreporter.stats.get("skipped", ())
    line = line_about({report.longrepr[2] for report in skipped})
    if line:
        terminalreporter.write_line(line)


def line_about(reasons: Collection[str]) -> str | None:
    """Return the line that names the programs that were missing; None if none was.

    Args:
        reasons: Why each of the skipped tests was skipped.
    """
    begins = {reason.removeprefix("Skipped: ").partition(ABSENT)[0] for reason in reasons}
    names = sorted(begins & PACKAGES.keys())
    if not names:
        return None
    return f"tests were skipped without {', '.join(names)}; to run them: {install(names)}"
