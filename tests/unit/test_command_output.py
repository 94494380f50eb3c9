"""Results of commands as people read them, and the cost of the command `redrb` itself."""

from __future__ import annotations

import subprocess
import sys

import pytest
from rich.text import Text

from redrb.commands import output
from redrb.commands.output import age, counted, percent, size, table
from redrb.environment import child_environment


def test_tables_are_aligned() -> None:
    assert table(("name", "size"), [("a", "1"), ("long", "123456")], left=("name",)) == [
        "name    size",
        "a          1",
        "long  123456",
    ]


def test_a_table_that_is_piped_is_plain_and_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    names = ["layer." * 50 + "weight", "[bold]", ":smile:"]
    head, *lines = table(("tensor", "bytes"), [(name, "1") for name in names], left=("tensor",))
    assert head.split() == ["tensor", "bytes"]
    assert [line.split() for line in lines] == [[name, "1"] for name in names]


def test_a_table_on_a_terminal_folds_long_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    lines = table(("tensor", "bytes"), [("x" * 30, "1")], left=("tensor",))
    assert len(lines) == 4
    assert "".join(line.split()[0] for line in lines[1:]) == "x" * 30


def test_numbers_are_for_people() -> None:
    assert [size(n) for n in (0, 999, 1000, 999_949, 999_950, 503_316_480, 2 * 10**15)] == [
        *("0 B", "999 B", "1.0 kB", "999.9 kB", "1.0 MB", "503.3 MB", "2000.0 TB")
    ]
    assert [counted(n, "tensor") for n in (0, 1, 2000)] == [
        "0 tensors",
        "1 tensor",
        "2,000 tensors",
    ]
    assert [age(s) for s in (0.4, 99, 150, 7200, 200_000)] == [
        *("0 s", "99 s", "2 min", "2.0 h", "2.3 d")
    ]
    assert [percent(*n) for n in ((0, 5), (1, 4), (1, 10**6), (0, 0))] == [
        *("0.00%", "25.00%", "<0.01%", "0.00%")
    ]


def test_help_imports_nothing_heavy() -> None:
    program = "import sys, redrb.cli\ntry: redrb.cli.main(['--help'])\nfinally: print(*sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=child_environment()
    )
    assert {"torch", "numpy", "redis", "rich"}.isdisjoint(printed.stdout.split())


def test_a_table_of_one_line_a_row_cuts_its_last_column_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_WIDEST", 24)
    rows = [[Text("65500"), Text("waiting"), Text("maker=maker-1 first=4")]]
    output.print_table(("id", "state", "more"), rows)
    assert capsys.readouterr().out.splitlines()[1].rstrip() == "65500  waiting  maker=m…"
