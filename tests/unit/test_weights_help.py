"""`redrb weights COMMAND --help` explains the columns of its tables."""

from __future__ import annotations

import pytest

from redrb.cli import main


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("put", "default: all that are there"),
        ("rm", "Delete all versions of weights, without asking. A trainer that still publishes"),
        ("get", "Exit status: 0 when the command has done its work; 2 when an argument is wrong"),
    ],
)
def test_help_explains_the_columns(
    command: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["weights", command, "--help"])
    assert words in " ".join(capsys.readouterr().out.split())
