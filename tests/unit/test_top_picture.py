"""The picture that `redrb top` prints, and its parts: complete, and without control characters."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from redrb.cli.output import show
from redrb.cli.top.heading import command_lines
from redrb.cli.top.pages import picture, task_page
from redrb.cli.top.tables import (
    staleness_table,
    tables_table,
    task_table,
    weights_table,
    worker_table,
)
from redrb.cli.top.text import Column, amount, fitted, line, rate, short, sparkline, wrapped
from redrb.stream.task.ledger import Ledger, SessionStats, StreamStats
from redrb.watch.state.findings import connection_finding
from redrb.watch.state.history import History
from redrb.watch.state.model import ClaimState, Staleness, State, TableState, WorkerState
from redrb.watch.state.observer import View
from tests.sample_state import history_of, sample_state, view_of

HOSTILE = "\x1b[2J\x07\u202e\n\u0000錆\u0301" * 20


def printed(view: View, task: str = "") -> str:
    history = history_of(view.state) if view.state else History()
    return "\n".join(each.plain for each in picture(view, history, task, "there"))


def test_a_picture_is_complete() -> None:
    text = printed(view_of(sample_state()))
    for shown in (
        "figures are 0.4 s old",
        "512.0 MB of 1.0 GB (51%)",
        "TASKS (2)",
        "31, 11 behind",
        "room 4.5 s",
        "0.1.0  11,776  reward 0.74, loss 0.031, kl 0.012",
        "4 warnings, 1 info",
        "do: redrb dead ls math",
        "do: redrb set math limit=8192",
        "taken, ever        1.12",
    ):
        assert shown in text
    assert "there is no task gone now" in printed(view_of(sample_state()), "gone")


@pytest.mark.parametrize("width", [80, 120, None])
@pytest.mark.parametrize(
    ("sessions", "shown"),
    [
        (SessionStats(open=1, begun=1), "1"),
        (SessionStats(open=9999, silent=123, begun=20_000, turns=1), "9999, 123 silent"),
    ],
)
def test_sessions_of_agents_are_shown_where_there_were_any(sessions, shown, width) -> None:
    state = sample_state()
    math, code = state.tasks
    assert "sessions" not in task_table(state.tasks, 2, History(), width)[0].plain
    main = math.groups[0]
    first = replace(main, stats=replace(main.stats, sessions=sessions))
    math = replace(math, groups=(first, *math.groups[1:]))
    head, *rows = task_table([math, code], 2, History(), width)
    assert "sessions" in head.plain
    assert shown in rows[0].plain
    page = "\n".join(each.plain for each in task_page(math, "math", History(), width))
    assert f"{sessions.open:,} open, {sessions.silent} of them silent" in page


def test_tables_stand_above_the_tasks_that_claim_their_rows() -> None:
    claims = (
        ClaimState("train:actor", ("x",), 1, 71, 401, 7),
        ClaimState("train:critic", ("x",), consumed=3),
    )
    state = sample_state()
    table = TableState(
        "train",
        rows=1001,
        made=1001,
        bytes=86_200_000,
        retained=60,
        limit=5000,
        max_bytes=10**9,
        run=2,
        change=int((state.time - 12) * 1e6),
        marks={"step-50": 9, "step-40": 7},
        claims=claims,
    )
    hidden = TableState(HOSTILE[:40], readable=False)
    lines = printed(view_of(replace(state, tables=(table, hidden)))).splitlines()
    first = next(number for number, each in enumerate(lines) if "TABLES (2)" in each)
    cells = [each.split() for each in lines[first + 1 : first + 5]]
    limits = ["60", "5,000,", "1.0", "GB", "2", "12", "s", "step-40,", "step-50"]
    assert cells[0] == ["train", "1,001", "86.2", "MB", *limits]
    assert cells[1] == ["train:actor", "401", "7", "71"]
    assert cells[2] == ["train:critic", "-", "-", "3"]
    assert "(not readable)" in lines[first + 4]
    for width in (79, 199):
        assert max(each.cell_len for each in tables_table(state, width)) <= width


def test_versions_in_use_are_those_of_makers_that_name_the_weights() -> None:
    state = sample_state()
    code, math = state.tasks
    named = tuple(replace(each, weights_name="actor") for each in math.workers)
    other = replace(state.weights[0], name="actor-reference", version=1)
    state = replace(
        state, tasks=(code, replace(math, workers=named)), weights=(*state.weights, other)
    )
    text = printed(view_of(state))
    assert "12 s  2 makers: 42, 1 maker: 31" in text
    assert text.count("makers: 42") == 1


def test_no_version_is_shown_as_none_of_makers_and_as_unknown_of_others() -> None:
    state = sample_state()
    code, math = state.tasks
    workers = tuple(replace(each, weight_version=0, behind=0) for each in math.workers)
    state = replace(state, tasks=(code, replace(math, workers=workers)))
    text = printed(view_of(state), "math")
    assert "3 makers: none" in text
    rows = [each for each in text.splitlines() if "trainer-0" in each]
    assert rows
    assert not any("none" in each for each in rows)
    assert sum("maker" in each and " none " in each for each in text.splitlines()) >= 3


@pytest.mark.parametrize("width", [79, 119, 199])
def test_no_figure_changes_the_columns(width: int) -> None:
    def headings(state: State) -> list[str]:
        math, history = state.tasks[1], history_of(state)
        tables = (
            task_table(state.tasks, state.tasks_total, history, width),
            worker_table(math, math.name, width),
            weights_table(state, width),
            staleness_table(math.name, math.main.staleness, width),
        )
        return [table[0].plain for table in tables]

    before = sample_state()
    code, math = before.tasks
    stats = replace(StreamStats.of({}), ledger=Ledger(), limit=0)
    main = replace(math.groups[0], stats=stats, staleness=Staleness())
    workers = [WorkerState(each.name, role=each.role) for each in math.workers]
    empty = replace(math, groups=(main,), workers=tuple(workers), rates=None, memory_bytes=None)
    large = Ledger(waiting=99_999, leased=99_999, dead=99_999)
    full = replace(math.groups[0], stats=replace(math.groups[0].stats, ledger=large))
    for task in (empty, replace(math, groups=(full,), order="a_long_name_of_an_order")):
        assert headings(replace(before, tasks=(code, task))) == headings(before)
    assert max(map(len, headings(before))) <= width
    assert "2 min" in headings(before)[0]


def test_the_page_of_a_task_shows_counts_as_whole_numbers() -> None:
    state = sample_state()
    lines = [each.plain for each in task_page(state.task("code"), "code", history_of(state), 80)]
    found = {each.split()[0]: each.split()[1] for each in lines if "most" in each}
    assert (found["put/s"], found["waiting"], found["leased"]) == ("1.5", "800", "0")


def test_an_empty_namespace_says_so() -> None:
    text = printed(View(State("lab", "localhost:6379/0", 0.0), 1))
    assert "--namespace names another one" in text


def test_figures_that_are_old_say_why() -> None:
    error = "127.0.0.1:6379 did not answer within 1.5 s"
    found = connection_finding("127.0.0.1:6379", error)
    text = printed(view_of(sample_state(), age_s=12.0, error=error, findings=(found,)))
    assert "figures are 12 s old" in text
    assert f"Redis cannot be read: {error}" in text
    assert "1 critical" in text
    text = printed(View(error=error))
    assert "no figures yet" in text
    assert error in text


def test_numbers_and_curves_are_short() -> None:
    assert [amount(number) for number in (0, 99_999, 123_456, 1_234_567, 5e9)] == [
        *("0", "99,999", "123k", "1.2M", "5.0G")
    ]
    assert [rate(per_s) for per_s in (None, 0.0, 0.04, 6.4, 1234.5)] == [
        *("-", "0.0", "0.04", "6.4", "1,234")
    ]
    assert [short(number) for number in (0, 9_999, 9_999.7, 12_345, 99_999, 999_999, 5e9)] == [
        *("0", "9999", "10k", "12k", "100k", "1.0M", "5.0G")
    ]
    assert max(len(rate(10**power * digits)) for power in range(9) for digits in (1, 9.99)) <= 5
    assert sparkline([0, 1, 2, None, 4], 5) == "▁▃▅ █"
    assert sparkline(list(range(100)), 10)[-1] == "█"
    assert (len(sparkline(list(range(95)), 10)), sparkline([], 10), sparkline([0], 3)) == (
        10,
        "",
        "▁",
    )
    assert wrapped("a long" + "g" * 10, 6) == ["a", "longgg", "gggggg", "gg"]


def test_no_command_prints_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    show(None, [f"name {HOSTILE}"], as_json=False)
    assert capsys.readouterr().out.removesuffix("\n").isprintable()
    show({"name": HOSTILE}, [], as_json=True)
    assert capsys.readouterr().out.removesuffix("\n").isprintable()


@pytest.mark.parametrize("width", [36, 42, 46, 52])
def test_a_narrow_table_uses_the_whole_width(width: int) -> None:
    """Only the first column gives way while it can, and the last one only for what is left."""
    columns = (
        Column("TASK", 20, left=True),
        Column("put/s", 14),
        Column("waits for", 13, left=True),
    )
    row = [line("a" * 30), line("1.0"), line("b" * 13)]
    shown = fitted(columns, [row], width)[1].plain
    assert len(shown) == width
    assert shown.endswith("b" * 13 if width >= 8 + 14 + 13 + 6 else "…")


@pytest.mark.parametrize("width", range(1, 140))
def test_a_command_that_is_too_wide_is_one_command_in_several_lines(width: int) -> None:
    words = [
        "redrb-maker",
        "RECIPE",
        "--task",
        "a b",
        "--url",
        "redis://user@a.host:6379/0",
        "--x=1",
    ]
    command = shlex.join(words)
    lines = command_lines(command, width)
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == words  # as a shell reads it
    assert max(map(len, lines)) <= width or lines == [command]
    assert width < 40 or max(map(len, lines)) <= width
