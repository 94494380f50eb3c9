"""Results of commands as people read them, and the cost of the command `redrb` itself."""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any

import pytest
from msgpack import ExtType
from rich.text import Text

from redrb.cli import output
from redrb.cli.output import age, percent, show, size, table
from redrb.cli.watching import _folded
from redrb.words import counted


def lines_of(*parts: Any, **options: Any) -> list[str]:
    return output._rendered(table(*parts, **options)).splitlines()


def test_tables_are_aligned():
    assert lines_of(("name", "size"), [("a", "1"), ("long", "123456")], left=("name",)) == [
        "name    size",
        "a          1",
        "long  123456",
    ]


def test_a_table_that_is_piped_is_plain_and_complete(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    names = ["layer." * 50 + "weight", "[bold]", ":smile:"]
    head, *lines = lines_of(("tensor", "bytes"), [(name, "1") for name in names], left=("tensor",))
    assert head.split() == ["tensor", "bytes"]
    assert [line.split() for line in lines] == [[name, "1"] for name in names]


def test_a_table_on_a_terminal_folds_long_cells(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    lines = lines_of(("tensor", "bytes"), [("x" * 30, "1")], left=("tensor",))
    assert len(lines) == 4
    assert "".join(line.split()[0] for line in lines[1:]) == "x" * 30


def test_numbers_are_for_people():
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


class Closed(io.StringIO):
    """Output whose reader has ended."""

    def write(self, text: str, /) -> int:
        if text:
            raise BrokenPipeError
        return 0


def test_values_that_json_lacks_are_printed_as_texts(capsys):
    show({"tags": {b"k": [b"v", float("nan")], "t": {"e": ExtType(5, b"x")}}}, [], as_json=True)
    expected = {"tags": {"b'k'": ["b'v'", None], "t": {"e": [5, "b'x'"]}}}
    assert json.loads(capsys.readouterr().out) == expected


def test_a_closed_pipe_is_an_error_also_where_rich_prints(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):
        show(None, [Text("a")], as_json=False)
    with pytest.raises(BrokenPipeError):
        show(None, [table(("a",), [[Text("b")]])], as_json=False)


def test_a_reader_that_has_ended_is_noticed_without_a_write(monkeypatch):
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        output.check_reader()
        os.close(reader)
        with pytest.raises(BrokenPipeError):
            output.check_reader()
    output.check_reader()  # of pytest, which has no descriptor


def test_lines_of_a_watched_command_fit_the_terminal():
    assert _folded("  a b", 80) == ["  a b"]
    assert _folded("日本語" * 4, 10) == ["日本語日本", "語日本語日", "本語"]
    assert _folded("x" * 25, 10) == ["x" * 10, "x" * 10, "x" * 5]


def test_a_table_of_one_line_a_row_cuts_its_last_column_only(monkeypatch, capsys):
    monkeypatch.setattr(output, "_WIDEST", 24)
    words = ("65500", "waiting", "maker=maker-1 first=4")
    rows = [[Text(word, no_wrap=True, overflow="ellipsis") for word in words]]
    show(None, [table(("id", "state", "more"), rows)], as_json=False)
    assert capsys.readouterr().out.splitlines()[1].rstrip() == "65500  waiting  maker=m…"
