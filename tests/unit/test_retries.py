"""What is run again, until when, and what an error that is raised in the end holds."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from redrb.connection.retries import again, insist, insist_async
from redrb.connection.stop import Stop
from redrb.errors import StoreClosed, StoreError, StoreUnavailable


def away(number: int = 0) -> StoreUnavailable:
    return StoreUnavailable(f"away {number}", where="here")


class Work:
    """Raises one error after another, then returns the number of its runs."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = [*errors]
        self.runs = 0
        self.noted: list[str] = []

    def __call__(self) -> int:
        self.runs += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.runs

    def note(self, error: Exception) -> None:
        self.noted.append(str(error))


def by_insist(work: Work, **options: Any) -> int:
    return insist(work, Stop(), work.note, **options)


def by_again(work: Work) -> int:
    failed: list[Exception] = []
    try:
        return work()
    except StoreUnavailable as error:
        failed.append(error)
    return again(
        work,
        failed,
        passes=lambda error: isinstance(error, StoreUnavailable),
        over=lambda: False,
        note=work.note,
        pause=lambda _seconds: None,
    )


def by_insist_async(work: Work) -> int:
    async def run() -> int:
        return work()

    running = insist_async(
        run, work.note, passes=lambda error: isinstance(error, StoreUnavailable), pause=no_pause
    )
    try:
        running.send(None)  # nothing suspends it; a task of asyncio would keep the error
    except StopIteration as done:
        return int(done.value)
    raise AssertionError("it waits")


async def no_pause(_seconds: float) -> None: ...


WAYS = pytest.mark.parametrize("run", [by_insist, by_again, by_insist_async])


@WAYS
@pytest.mark.parametrize("failures", [0, 1, 2, 6])
def test_work_runs_until_it_succeeds(run, failures):
    work = Work(*map(away, range(failures)))
    assert run(work) == failures + 1
    assert work.noted == [f"away {number}" for number in range(failures)]


@WAYS
@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize(
    "error", [ZeroDivisionError("bad"), KeyboardInterrupt(), StoreClosed("closed")]
)
def test_other_errors_are_raised_at_once_whenever_they_come(run, before, error):
    work = Work(*map(away, range(before)), error, away())
    with pytest.raises(type(error)) as caught:
        run(work)
    assert caught.value is error
    assert work.runs == before + 1
    assert error.__context__ is None


@pytest.mark.parametrize("before", [0, 1, 3])
def test_errors_among_the_exceptions_are_raised(before):
    refused = StoreClosed("closed")
    work = Work(*[StoreError(str(number)) for number in range(before)], refused)
    with pytest.raises(StoreClosed):
        by_insist(work, errors=StoreError, unless=StoreClosed)
    assert work.runs == before + 1


@pytest.mark.parametrize("once_more", [False, True])
@pytest.mark.parametrize("asked_in", ["work", "pause"])
def test_a_stop_ends_it_with_the_last_error(asked_in, once_more):
    stop = Stop()
    work = Work(away(0), away(1), away(2), away(3))

    def run() -> int:
        if asked_in == "work" and work.runs == 1:
            stop.ask()
        return work()

    def note(error: Exception) -> None:
        work.note(error)
        if asked_in == "pause" and len(work.noted) == 2:
            stop.ask()

    with pytest.raises(StoreUnavailable) as caught:
        insist(run, stop, note, once_more=once_more)
    more = asked_in == "pause" and once_more
    assert (work.runs, str(caught.value)) == (2 + more, f"away {1 + more}")


def test_a_pause_ends_when_the_stop_is_asked():
    stop = Stop()
    work = Work(*map(away, range(10_000)))
    ended = threading.Event()

    def run() -> None:
        with pytest.raises(StoreUnavailable):
            insist(work, stop, work.note)
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    stop.ask()
    assert ended.wait(30)
    thread.join()


def test_no_pause_is_longer_than_the_time_that_is_left(monkeypatch):
    left = [3.0, 1e-3, 0.0]
    waits: list[float] = []
    stop = Stop()
    monkeypatch.setattr(stop, "wait", waits.append)
    monkeypatch.setattr("redrb.connection.retries.PAUSES", lambda _state: 60.0)
    work = Work(*map(away, range(9)))
    with pytest.raises(StoreUnavailable):
        insist(work, stop, lambda _error: None, left_s=lambda: left[min(work.runs - 1, 2)])
    assert waits == [3.0, 1e-3]
    assert work.runs == 3


@WAYS
@pytest.mark.parametrize("passed", [0, 2])
@pytest.mark.parametrize("kind", [ZeroDivisionError, StoreClosed])
def test_an_error_shows_the_line_that_raised_it_and_holds_nothing_else(run, kind, passed):
    class Held:
        pass

    def caller(work: Work) -> weakref.ref[Held]:
        held = Held()
        gone = weakref.ref(held)
        found.append(gone)
        run(work)
        raise AssertionError(held)

    found: list[weakref.ref[Held]] = []
    lines: list[str | None] = []
    gc.collect()
    gc.disable()
    try:
        try:
            caller(Work(*map(away, range(passed)), kind("the end")))
        except kind as raised:
            lines.append(traceback.extract_tb(raised.__traceback__)[-1].line)
        assert lines == ["raise self.errors.pop(0)"]
        assert found[0]() is None
    finally:
        gc.enable()


def test_errors_that_are_passed_over_keep_their_traceback():
    kept: list[Exception] = []
    work = Work(away(0), away(1))
    assert insist(work, Stop(), kept.append) == 3
    assert [traceback.extract_tb(each.__traceback__)[-1].name for each in kept] == ["__call__"] * 2


def test_loadings_may_be_counted():
    """`over` is asked once after each error."""
    asked: list[int] = []

    def over() -> bool:
        asked.append(1)
        return len(asked) == 4

    work = Work(*map(away, range(9)))
    with pytest.raises(StoreUnavailable, match="away 3"):
        by_insist(work, over=over)
    assert work.runs == 4


PROGRAM = """
import sys, redrb
with redrb.connect("fake://none") as client:
    client.execute("SET", "a", "b")
assert "tenacity" not in sys.modules
"""


def test_requests_that_succeed_do_not_load_tenacity():
    subprocess.run([sys.executable, "-c", PROGRAM], timeout=120, check=True)


def test_pauses_grow_to_a_second():
    from redrb.connection.retries import PAUSES

    class State:
        attempt_number = 1

    longest: Callable[[int], float] = lambda number: max(  # noqa: E731
        PAUSES(type("", (), {"attempt_number": number})()) for _ in range(400)
    )
    for number in (1, 2, 6, 7, 100):
        bound = min(1.0, 0.02 * 2 ** (number - 1))
        assert 0.9 * bound < longest(number) <= bound
    assert math.isfinite(longest(10_000))
