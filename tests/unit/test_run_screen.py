"""The screen of a run: a row for each worker, and why groups are filtered."""

from __future__ import annotations

import io
import re
import time
from typing import Any

from rich.console import Console

from redrb.launch.history import History
from redrb.launch.job import Job
from redrb.launch.rate import Rate
from redrb.launch.report import summary, table
from redrb.launch.screen import _line, _panel
from redrb.launch.supervisor import Shown, State
from redrb.recipes.sorting import Sorting

KILLED = "was killed by SIGKILL (by the kernel if the machine ran out of memory, or by someone)"


def shown(history: History, *processes: Shown, height: int = 24) -> str:
    """Return the screen of a run on a terminal of 80 columns."""
    job = Job(title="t", name="sorting", recipe=Sorting(), given={}, makers=3, restarts=0)
    text = io.StringIO()
    console = Console(file=text, width=80, height=height)
    console.print(_panel(3.0, history, None, job, processes, height=height))
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    return "\n".join(lines)


def event(worker: str, event: str, **values: Any) -> dict[str, Any]:
    return {"event": event, "worker": worker, "time": time.time(), **values}


def with_events() -> History:
    history = History()
    history.add(event("trainer", "evaluation", reward=float("nan"), weight_version=1, seconds=1))
    put = dict.fromkeys(("step_s", "admission_s", "send_s", "backpressure_s"), 0.1)
    history.add(event("maker-1", "put", step=7, groups=32, **put))
    for line in (5, 5, 9):
        why = f"the reward raised KeyError: 'answer' (my.py, line {line})"
        history.add(event("maker-2", "filtered", groups=3, why=why, kind=f"line {line}"))
    return history


def test_each_worker_has_a_row_with_its_state() -> None:
    screen = shown(
        with_events(),
        Shown("the server", State.RUNNING),
        Shown("trainer", State.RUNNING, pid=41),
        Shown("maker-1", State.RUNNING, pid=42),
        Shown("maker-2", State.WAITING, restart_in_s=3.2, why=KILLED),
        Shown("maker-3", State.GIVEN_UP, why="ended with status 1: ValueError: no"),
    )
    rows = {line.split()[1]: line for line in screen.splitlines()[-5:-1]}
    assert "running" in rows["trainer"]
    assert "41" in rows["trainer"]
    assert "step 7, 32 groups, 0 s ago" in rows["maker-1"]
    assert "restart in 4 s" in rows["maker-2"]
    assert "was killed by SIGKILL" in rows["maker-2"]
    assert "given up" in rows["maker-3"]
    assert "ValueError: no" in rows["maker-3"]
    assert "the server" not in screen
    assert len(screen.splitlines()) < 24


def test_a_job_that_stands_still_has_no_rate() -> None:
    now = 100.0
    history = History(_rate=Rate(lambda: now))
    for seconds in (1, 2, 3):
        history.add(event("trainer", "step", seconds=seconds, samples=64, step=seconds))
    assert "64 samples/s  staleness" in _line(3.0, history, None)
    now += 4
    assert "64 samples/s  staleness" in _line(7.0, history, None)
    now += 41
    assert " 0 samples/s, no step for 45 s" in _line(48.0, history, None)
    assert "0   (192 trained, no step for 45 s)" in shown(history)
    history.add(event("trainer", "step", seconds=48, samples=64, step=4))
    assert history.rate > 0


def test_slow_steps_are_no_standstill_and_earlier_runs_have_no_rate() -> None:
    now = 100.0
    history = History(_rate=Rate(lambda: now))
    for seconds in (60, 120):
        history.add(event("trainer", "step", seconds=seconds, samples=60, step=1))
    now += 100
    assert (history.rate, history.quiet_s) == (1.0, 0.0)
    now += 100
    assert (history.rate, history.quiet_s) == (0.0, 200.0)
    history.begin_run()
    assert (history.rate, history.quiet_s) == (0.0, 0.0)
    assert " 0 samples/s  staleness ..." in _line(1.0, history, None)
    assert re.search(r"staleness +\.\.\. ", shown(history))


def test_workers_beyond_the_height_are_counted_and_those_that_do_not_run_stay() -> None:
    makers = [Shown(f"maker-{number}", State.RUNNING, pid=number) for number in range(1, 60)]
    failed = Shown("maker-60", State.GIVEN_UP, why="ended with status 2")
    screen = shown(History(), Shown("trainer", State.RUNNING, pid=99), *makers, failed)
    assert len(screen.splitlines()) < 24
    assert "trainer" in screen
    assert "maker-60" in screen
    [left_out] = re.findall(r"(\d+) more +(\d+) running", screen)
    listed = len(re.findall("maker-", screen))
    assert left_out == (str(60 - listed),) * 2
    assert listed > 5


def test_faults_are_counted_on_the_screen_and_in_the_report() -> None:
    history = with_events()
    screen = " ".join(shown(history).replace("│", "").split())
    assert "6 groups: the reward raised KeyError: 'answer' (my.py, line 5)" in screen
    assert len(history.new_faults()) == 2
    history.begin_run()  # faults of earlier runs are counted, and not said again
    assert history.new_faults() == []
    figures = summary(1.0, history, None)
    assert [fault["groups"] for fault in figures["faults"]] == [6, 3]
    text = io.StringIO()
    Console(file=text, width=120).print(table(figures, history, None))
    assert "groups filtered: the reward raised KeyError: 'answer' (my.py, line 9)" in (
        " ".join(text.getvalue().replace("│", " ").split())
    )
    assert history.rewards == []  # an evaluation without a number is none
