"""The picture of `redrb top`: it fits, says what is wrong, and has no control characters."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from redrb.browse.records import GroupView, Page, SampleView
from redrb.commands.output import show
from redrb.commands.top.columns import Column, fitted
from redrb.commands.top.group_reader import Found
from redrb.commands.top.keys import keys_in
from redrb.commands.top.picture import picture
from redrb.commands.top.place import Place
from redrb.commands.top.text import amount, line, rate, short, sparkline, wrapped
from redrb.state.findings import connection_finding, findings_of
from redrb.state.history import History
from redrb.state.model import Staleness, State, WorkerState
from redrb.state.view import View
from redrb.stream.task.ledger import Ledger, StreamStats
from tests.sample_state import sample_state

HOSTILE = "\x1b[2J\x07\u202e\n\u0000錆\u0301" * 20
ALL = Place()
PLACES = [
    *(Place(listed=listed, finding=3) for listed in ("tasks", "workers", "findings")),
    *(Place(page=page) for page in ("task", "worker", "finding", "groups", "group", "help")),
    Place(page="task", offset=1_000),
    Place(task="gone"),
]


def view_of(state: State | None, **others: object) -> View:
    findings = findings_of(state) if state else ()
    return replace(View(state, 1, 0.4, "", findings), **others)  # type: ignore[arg-type]


def history_of(state: State, looks: int = 30) -> History:
    history = History()
    for _ in range(looks):
        history.add(state)
    return history


def drawn(view: View, place: Place = ALL, width: int | None = 80, height: int = 24) -> list[str]:
    history = history_of(view.state) if view.state else History()
    rows = None if width is None else height
    return [each.plain for each in picture(view, history, place, "there", width=width, height=rows)]


def groups_found(**others: object) -> Found:
    """Groups that a list shows, one of them with hostile texts."""
    sample = SampleView(0, HOSTILE, 3, 1.0, tags={HOSTILE: HOSTILE}, extras={"text": HOSTILE})
    rewards = (0.5, 1.0)
    views = [
        GroupView(n, "waiting", "completed", 900, 2, 3, rewards=rewards, reward=0.75)
        for n in range(40, 9, -1)
    ]
    views[1] = replace(views[1], tags={HOSTILE: HOSTILE}, samples=(sample,), notes=(HOSTILE,))
    page = Page("math", "default", 7, tuple(views), 31, 31, notes=(HOSTILE,))
    return replace(Found(page, "", time.monotonic()), **others)  # type: ignore[arg-type]


def hostile_state() -> State:
    state = sample_state()
    tasks = tuple(
        replace(
            task,
            name=task.name + HOSTILE,
            order=HOSTILE,
            settings={HOSTILE: HOSTILE},
            workers=tuple(
                replace(
                    each, name=HOSTILE, host=HOSTILE, redrb=HOSTILE, metrics={HOSTILE: float("nan")}
                )
                for each in task.workers
            ),
        )
        for task in state.tasks
    )
    weights = tuple(replace(each, name=HOSTILE, kind=HOSTILE) for each in state.weights)
    servers = tuple(replace(each, version=HOSTILE) for each in state.servers)
    return replace(state, namespace=HOSTILE, tasks=tasks, weights=weights, servers=servers * 3)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60), (40, 8), (20, 3), (1, 1)])
def test_every_page_fits_every_terminal(size: tuple[int, int]) -> None:
    width, height = size
    for state in (sample_state(), hostile_state(), None):
        view = view_of(state, error=HOSTILE if state is None else "")
        for place in PLACES:
            history = history_of(state) if state else History()
            lines = picture(
                view, history, place, HOSTILE, found=groups_found(), width=width, height=height
            )
            assert len(lines) <= height
            assert max(line.cell_len for line in lines) <= width
            assert all(line.plain.isprintable() for line in lines)


def test_an_ordinary_terminal_shows_everything_of_importance() -> None:
    text = "\n".join(drawn(view_of(sample_state())))
    for shown in (
        "figures are 0.4 s old",
        "512.0 MB of 1.0 GB (51%)",
        "TASKS (2)",
        "code             1.5      0.0      800",
        "> math             6.4      6.2      511",
        "32/640",
        "room 4.5 s",
        "31, 11 behind",
        "dead    40, 2 behind",
        "actor               42  delta    3.1 GB     12 s  2 makers: 42, 1 maker: 31",
        "4 warnings, 1 info",
        "do: redrb dead ls math",
        "and 1 more",
        "q end",
    ):
        assert shown in text


def test_versions_in_use_are_those_of_makers_that_name_the_weights() -> None:
    state = sample_state()
    code, math = state.tasks
    named = tuple(replace(each, weights_name="actor") for each in math.workers)
    other = replace(state.weights[0], name="actor-reference", version=1)
    state = replace(
        state, tasks=(code, replace(math, workers=named)), weights=(*state.weights, other)
    )
    text = "\n".join(drawn(view_of(state)))
    assert "42  delta    3.1 GB     12 s  2 makers: 42, 1 maker: 31" in text
    assert text.count("makers: 42") == 1


@pytest.mark.parametrize("width", [80, 120, 200])
def test_no_figure_changes_the_columns(width: int) -> None:
    def headings(state: State) -> list[str]:
        lines = drawn(view_of(state), width=width, height=80)
        words = ("TASKS", "WORKERS", "WEIGHTS", "STALENESS")
        return [each for each in lines if each.strip().startswith(words)]

    before = sample_state()
    code, math = before.tasks
    stats = replace(StreamStats.of({}), ledger=Ledger(), limit=0)
    main = replace(math.groups[0], stats=stats, staleness=Staleness())
    workers = [WorkerState(each.name, each.role) for each in math.workers]
    empty = replace(math, groups=(main,), workers=tuple(workers), rates=None, memory_bytes=None)
    large = Ledger(waiting=99_999, leased=99_999, dead=99_999)
    full = replace(math.groups[0], stats=replace(math.groups[0].stats, ledger=large))
    assert len(headings(before)) == 4
    for task in (empty, replace(math, groups=(full,), order="a_long_name_of_an_order")):
        assert headings(replace(before, tasks=(code, task))) == headings(before)
    assert "2 min" in headings(before)[0]


def test_a_picture_for_a_file_is_complete() -> None:
    text = "\n".join(drawn(view_of(sample_state()), width=None))
    assert "do: redrb set math limit=8192" in text
    assert "0.1.0  11,776  reward 0.74, loss 0.031, kl 0.012" in text
    assert "taken, ever        1.12" in text


def test_the_page_of_a_task_shows_counts_as_whole_numbers() -> None:
    lines = drawn(view_of(sample_state()), Place(page="task", task="code"), height=40)
    found = {each.split()[0]: each.split()[1] for each in lines if "most" in each}
    assert (found["put/s"], found["waiting"], found["leased"]) == ("1.5", "800", "0")


def test_a_task_with_many_workers_shows_the_selected_one_and_how_many_are_hidden() -> None:
    state = sample_state()
    math = state.tasks[1]
    many = tuple(replace(math.workers[0], name=f"maker-{number}") for number in range(150))
    state = replace(state, tasks=(replace(math, workers=many, workers_total=400),))
    text = "\n".join(drawn(view_of(state), Place(listed="workers", worker="maker-120")))
    assert "WORKERS of math (400)" in text
    assert "> maker-120" in text
    assert "more (arrows)" in text
    assert "FINDINGS" in text


def test_an_empty_namespace_says_so() -> None:
    empty = View(State("lab", "localhost:6379/0", 0.0), 1)
    lines = [each.plain for each in picture(empty, History(), Place(), "namespace lab")]
    assert any("--namespace names another one" in each for each in lines)


def test_figures_that_are_old_say_why() -> None:
    error = "127.0.0.1:6379 did not answer within 1.5 s"
    found = connection_finding("127.0.0.1:6379", error)
    text = "\n".join(drawn(view_of(sample_state(), age_s=12.0, error=error, findings=(found,))))
    assert "figures are 12 s old" in text
    assert f"Redis cannot be read: {error}" in text
    assert "1 critical" in text
    text = "\n".join(drawn(View(error=error)))
    assert "no figures yet" in text
    assert error in text


def test_keys_select_rows_and_open_pages() -> None:
    view = view_of(sample_state())
    place: Place | None = Place()
    seen = []
    for key in keys_in(b"k\t\x1b[B\x1bOB\r\x1b\t\x1b[6~\r?"):
        assert place is not None
        place = place.after(key, view)
        assert place is not None
        seen.append((place.page, place.listed, place.task, place.worker, place.finding))
    assert seen == [
        ("all", "tasks", "code", "", 0),
        ("all", "workers", "code", "", 0),
        ("all", "workers", "code", "", 0),  # nobody works on it
        ("all", "workers", "code", "", 0),
        ("all", "workers", "code", "", 0),
        ("all", "workers", "code", "", 0),
        ("all", "findings", "code", "", 0),
        ("all", "findings", "code", "", 4),
        ("finding", "findings", "code", "", 4),
        ("help", "findings", "code", "", 4),
    ]
    place = Place(listed="workers").after("end", view)
    assert place == Place(listed="workers", task="math", worker="trainer-0")
    assert place.after("enter", view) == replace(place, page="worker")
    assert replace(place, page="worker").after("escape", view) == place
    assert Place().after("q", view) is None
    assert Place().after("x", view) == Place()
    assert Place().after("enter", View()) == Place()
    assert replace(Place(page="task"), offset=3).after("up", view) == Place(page="task", offset=2)


def test_keys_list_the_groups_of_a_task_and_open_one() -> None:
    view, ids = view_of(sample_state()), groups_found().ids
    place: Place | None = Place()
    seen = []
    for key in keys_in(b"gjjk\r\x1b") + ["end", "d", "n", "escape"]:
        assert place is not None
        place = place.after(key, view, ids)
        assert place is not None
        seen.append((place.page, place.task, place.status, place.group_among(ids)))
    assert seen == [
        ("groups", "math", "", 40),
        ("groups", "math", "", 39),
        ("groups", "math", "", 38),
        ("groups", "math", "", 39),
        ("group", "math", "", 39),
        ("groups", "math", "", 39),
        ("groups", "math", "", 10),
        ("groups", "math", "dead", 40),
        ("groups", "math", "", 40),
        ("all", "math", "", 40),
    ]
    place = Place(page="groups", status="dead")
    assert place.after("enter", view) == place.after("down", view) == place  # it is empty
    assert Place().after("g", View()) == Place()


def test_the_list_of_groups_keeps_the_selected_one_in_sight_and_says_why_it_is_old() -> None:
    view, place = view_of(sample_state()), Place(page="groups", status="leased", group=12)

    def shown(found: Found) -> str:
        lines = picture(view, History(), place, "there", found=found, width=80, height=24)
        return "\n".join(each.plain for each in lines)

    text = shown(groups_found(error="no answer"))
    assert "> 12" in text
    assert "more (arrows)" in text
    assert "l [leased]" in text
    assert "Groups cannot be read: no answer" in text
    assert "reading ..." in shown(Found())
    assert "no such groups" in shown(Found(Page("math", "default", 7, (), 0, 0)))


def test_keys_that_have_no_name_are_left_out() -> None:
    assert keys_in(b"\x1b[Zj\xff\x01\x1b[31;5u\x1b[A") == ["back tab", "j", "up"]


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
    shown = fitted(columns, [row], width).rows[0].plain
    assert len(shown) == width
    assert shown.endswith("b" * 13 if width >= 8 + 14 + 13 + 6 else "…")
