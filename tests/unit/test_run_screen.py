"""The line of a run: its rate; why groups are filtered; its screen."""

from __future__ import annotations

import io
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import redrb
from redrb.cli.run.history import JobEvents
from redrb.cli.run.report import progress_line, summary, table
from redrb.cli.run.run import Run
from redrb.cli.run.screen import JobScreen, show_job
from redrb.watch.state.model import State
from tests.sample_state import sample_state, view_of
from tests.samples import numbered
from tests.troubled_states import with_worker
from tests.unit.test_top_screen import WHERE, Observer, drawn, shown


def event(worker: str, event: str, **values: Any) -> dict[str, Any]:
    return {"event": event, "worker": worker, "time": time.time(), **values}


def with_events() -> JobEvents:
    history = JobEvents()
    history.add(event("trainer", "evaluation", reward=float("nan"), weight_version=1, seconds=1))
    put = dict.fromkeys(("step_s", "admission_s", "send_s", "backpressure_s"), 0.1)
    history.add(event("maker-1", "put", step=7, groups=32, **put))
    for line in (5, 5, 9):
        why = f"the reward raised KeyError: 'answer' (my.py, line {line})"
        history.add(event("maker-2", "filtered", groups=3, why=why, kind=f"line {line}"))
    return history


def test_a_job_that_stands_still_has_no_rate() -> None:
    now = 100.0
    history = JobEvents(_clock=lambda: now)
    for seconds in (1, 2, 3):
        history.add(event("trainer", "step", seconds=seconds, samples=64, step=seconds))
    assert "64 samples/s  staleness" in progress_line(3.0, history, None)
    now += 4
    assert "64 samples/s  staleness" in progress_line(7.0, history, None)
    now += 41
    assert " 0 samples/s, no step for 45 s" in progress_line(48.0, history, None)
    history.add(event("trainer", "step", seconds=48, samples=64, step=4))
    assert history.rate > 0


@pytest.mark.parametrize("kind", ["start", "evaluation", "step", "publish"])
def test_a_trainer_over_its_time_is_ended_once_it_gets_on_no_more(kind: str) -> None:
    """A busy machine starts workers slowly: then a run lasts longer than its limit."""
    now, looks = 100.0, 0
    history = JobEvents(_clock=lambda: now)

    def look(_: float) -> None:
        nonlocal now, looks
        now, looks = now + 5, looks + 1
        history.add(event("maker-1", "put", step=1, groups=1))
        if looks <= 50:
            history.add(event("trainer", kind, step=looks, seconds=looks))

    job: Any = SimpleNamespace(most_seconds=0.0, most_silent_s=20.0)
    folder: Any = None
    run = Run(job, folder)
    run._history, run._kept = history, []
    run._supervisor = SimpleNamespace(over="", step=look)  # type: ignore[assignment]
    run._interrupt = SimpleNamespace(number=0)  # type: ignore[assignment]
    history.begin_run()
    run.follow()
    assert looks == 55
    assert run._kept[-1].plain == "the trainer did not end in time: no step for 25 s"


def test_a_standstill_names_the_newest_fault_until_a_step_comes() -> None:
    now = 100.0
    history = JobEvents(_clock=lambda: now)

    def fault(number: int) -> None:
        history.add(event("maker-1", "filtered", groups=1, why=f"fault {number}", kind=str(number)))

    fault(0)
    history.begin_run()  # a fault of an earlier run says nothing of this one
    assert "fault" not in progress_line(1.0, history, None)
    fault(1)
    assert progress_line(1.0, history, None).endswith("; newest fault: fault 1")
    for seconds in (1, 2, 3):
        history.add(event("trainer", "step", seconds=seconds, samples=64, step=seconds))
    for number in range(30):  # more kinds than are counted
        fault(number)
    assert "fault" not in progress_line(3.0, history, None)
    now += 60
    assert "no step for 60 s" in progress_line(63.0, history, None)
    assert progress_line(63.0, history, None).endswith("; newest fault: fault 29")


def test_slow_steps_are_no_standstill_and_earlier_runs_have_no_rate() -> None:
    now = 100.0
    history = JobEvents(_clock=lambda: now)
    for seconds in (60, 120):
        history.add(event("trainer", "step", seconds=seconds, samples=60, step=1))
    now += 100
    assert (history.rate, history.quiet_s) == (1.0, 0.0)
    now += 100
    assert (history.rate, history.quiet_s) == (0.0, 200.0)
    history.begin_run()
    assert (history.rate, history.quiet_s) == (0.0, 0.0)
    assert " 0 samples/s  staleness ..." in progress_line(1.0, history, None)


def test_the_line_of_a_run_says_which_inference_server_is_away() -> None:
    said = "its inference server at http://h:8000 (asked from gpu-02) has not answered for "
    for waits_s, end in ((1.0, ""), (21.0, f"{said}21.0 s."), (6000.0, f"{said}1.7 h.")):
        state = with_worker("maker", **AWAY | {"waits_s": waits_s})
        [maker] = [each for each in state.tasks[0].workers if each.waits_for == "engine"]
        line = line_of(state)
        assert (said in line) == bool(end)
        assert line.endswith(f"; maker {maker.name}: {end}" if end else line)


AWAY = {"waits_for": "engine", "waits_s": 21.0, "engine": "http://h:8000", "host": "gpu-02"}


def line_of(state: State) -> str:
    """Return the line of a run of the task `math`."""
    run: Any = a_run(
        lambda: None,
        _observer=SimpleNamespace(newest=lambda: view_of(state)),
        _started=0.0,
        _history=JobEvents(),
    )
    return Run._line(run)


@pytest.mark.parametrize("makers", [1, 6])
def test_the_line_of_a_run_says_nothing_of_makers_of_other_tasks(makers: int) -> None:
    state = with_worker("maker", **AWAY)
    [task] = state.tasks
    [maker] = [each for each in task.workers if each.waits_for == "engine"]
    workers = tuple(replace(maker, name=f"maker-{n} of math") for n in range(makers))
    others = tuple(replace(task, name=name, workers=workers) for name in ("code", "a-math"))
    well = replace(task, workers=())
    assert "inference server" not in line_of(replace(state, tasks=(*others, well)))
    own = replace(task, workers=tuple(replace(each, engine="http://own:1") for each in workers))
    said = line_of(replace(state, tasks=(*others, own)))
    assert "inference server at http://own:1" in said
    assert "http://h:8000" not in said
    assert ("; 6 workers: maker-0" in said) == (makers == 6)


def test_faults_are_said_once_and_counted_in_the_report() -> None:
    history = with_events()
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
    assert history.reward_last is None  # an evaluation without a number is none


def test_a_trainer_that_got_no_batch_did_not_wait_for_none_of_its_time() -> None:
    def waited(history: JobEvents) -> str:
        text = io.StringIO()
        Console(file=text, width=100).print(table(summary(1.0, history, None), history, None))
        return re.search(r"trainer waited for data, of its time +│ +(.*?) +│", text.getvalue())[1]

    history = with_events()
    assert waited(history) == "it got no batch"
    history.steps = 1
    assert waited(history) == "0.0%"


def test_the_report_tells_the_seconds_of_all_runs_from_those_of_this_run() -> None:
    history = JobEvents()
    history.add({"event": "step", "samples": 100, "seconds": 1.0})
    history.add({"event": "finished", "seconds": 40.0})
    history.begin_run()
    figures = summary(10.0, history, None)
    assert (figures["seconds"], figures["seconds_of_run"]) == (50.0, 10.0)
    assert figures["samples_per_second"] == 2.0  # of all runs, as the samples are
    text = io.StringIO()
    Console(file=text, width=120).print(table(figures, history, None))
    assert re.search(r"seconds of all runs / of this run\W+50\.0 / 10\.0", text.getvalue())


def a_run(follow: Callable[[], None], **others: Any) -> Any:
    """Stands for a run of the task `math`."""
    job = SimpleNamespace(recipe=SimpleNamespace(task_name="math"))
    return SimpleNamespace(
        **{"job": job, "follow": follow, "said": list, "screen_ended": lambda: None} | others
    )


def test_the_screen_shows_a_run_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """`show_job` runs it in a terminal; here the screen has none, and is used as its user does."""
    over, interrupted = threading.Event(), threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    text: list[str] = []

    def follow() -> None:
        assert interrupted.wait(60)
        over.set()

    async def use(screen: JobScreen, **_: Any) -> None:
        async with screen.run_test(size=(80, 24)) as pilot:
            await drawn(pilot)
            text.extend(shown(pilot))
            await pilot.press("q")
            while screen.is_running and not over.is_set():
                await pilot.pause()

    monkeypatch.setattr(JobScreen, "run_async", use)
    observer: Any = Observer(view_of(sample_state()))
    try:
        said = ["redrb run x", "7 s  reward 0.500"]
        show_job(a_run(follow, said=lambda: said), observer, WHERE)
    finally:
        signal.signal(signal.SIGINT, before)
    assert over.is_set()
    assert text[2:4] == [each.ljust(80) for each in ("redrb run x", "7 s  reward 0.500")]
    assert "WORKERS of math" in "\n".join(text)


def test_a_run_whose_screen_fails_goes_on_and_says_what_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = threading.Event()

    def follow() -> None:
        assert closed.wait(60)

    async def fail(screen: JobScreen) -> None:
        raise RuntimeError("the terminal is gone")

    monkeypatch.setattr(JobScreen, "run_async", fail)
    observer: Any = Observer(view_of(sample_state()))
    with pytest.raises(RuntimeError, match="the terminal is gone"):
        show_job(a_run(follow, screen_ended=closed.set), observer, WHERE)
    assert closed.is_set()


def test_a_fault_of_a_run_is_raised_after_its_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(screen: JobScreen) -> None:
        async with screen.run_test():
            pass

    def follow() -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(JobScreen, "run_async", use)
    observer: Any = Observer(view_of(sample_state()))
    with pytest.raises(RuntimeError, match="a fault"):
        show_job(a_run(follow), observer, WHERE)


def test_the_table_says_what_waiting_groups_are(namespace: str) -> None:
    history = JobEvents()
    history.reward_first, history.reward_last = 0.1, 0.9
    with (
        redrb.connect(f"fake://{namespace}") as client,
        redrb.ExperienceStream(client, "sort", namespace=namespace) as stream,
    ):
        stream.put(numbered(1))
        stats = stream.stats()
    text = io.StringIO()
    Console(file=text, width=100).print(table(summary(1.0, history, stats), history, stats))
    assert "groups waiting, made but not trained by the end" in text.getvalue()
