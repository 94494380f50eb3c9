"""Rates of a state: steady for slow trainers, and zero soon after everything has stopped."""

from __future__ import annotations

import pytest

from redrb.stream.task.ledger import Ledger, StreamStats
from redrb.watch.state.model import ConsumerGroupState, ServerState, State, TaskState, WorkerState
from redrb.watch.state.rates import WINDOW_S, RateWindow


def state(
    time: float, acked: int = 0, *, worker: WorkerState | None = None, incarnation: str = "a"
) -> State:
    stats = StreamStats(Ledger(put=acked, acked=acked), joined=1, samples_acked=4 * acked)
    task = TaskState(
        "math",
        incarnation=incarnation,
        groups=(ConsumerGroupState("default", stats),),
        workers=(worker,) if worker else (),
    )
    server = ServerState("here", cpu_s=time / 4)
    return State("default", "here", 1000.0 + time, servers=(server,), tasks=(task,))


def acked_of(found: State) -> float | None:
    rates = found.tasks[0].rates
    return rates.acked if rates else None


def test_a_trainer_with_a_batch_each_three_seconds_has_a_steady_rate() -> None:
    window = RateWindow()
    found = [window.rated(state(second, 30 * (second // 3))) for second in range(40)]
    assert acked_of(found[0]) is None
    settled = [acked_of(each) for each in found[12:]]
    assert all(each is not None and 9.0 - 1e-9 <= each <= 12.0 for each in settled)
    rates = found[-1].tasks[0].rates
    assert rates.over_s == pytest.approx(WINDOW_S)
    assert rates.samples_acked == pytest.approx(4 * rates.acked)
    assert found[-1].servers[0].cpu_share == pytest.approx(0.25)
    stopped = [window.rated(state(second, 390)) for second in range(40, 52)]
    assert acked_of(stopped[-1]) == 0.0


def test_looks_that_follow_too_soon_keep_the_rates() -> None:
    window = RateWindow()
    found = [window.rated(state(at / 10, at)) for at in range(5)]
    assert [acked_of(each) for each in found] == [
        *(None, None, *(pytest.approx(10.0) for _ in range(3)))
    ]


def test_looks_with_long_times_between_them_have_rates() -> None:
    window = RateWindow()
    found = [window.rated(state(60.0 * at, 60 * at * at)) for at in range(3)]
    assert [acked_of(each) for each in found] == [None, 1.0, 3.0]


def test_what_begins_anew_has_no_rates() -> None:
    window = RateWindow()
    for second in range(3):
        window.rated(state(second, second))
    assert acked_of(window.rated(state(3, 0, incarnation="b"))) is None
    assert acked_of(window.rated(state(4, 1, incarnation="b"))) == 1.0
    assert acked_of(window.rated(state(-100, 2, incarnation="b"))) is None  # the clock was set back
    assert acked_of(window.rated(state(-99, 3, incarnation="b"))) == 1.0
    assert window.rated(state(-200)).servers[0].cpu_share is None


def test_the_rate_of_a_worker_is_that_between_its_announcements() -> None:
    window, rates = RateWindow(), []
    for second in range(40):
        said = second - second % 3  # announced each 3 s; 30 groups each 5 s
        worker = WorkerState(
            name="one",
            role="trainer",
            seen_s=second - said,
            uptime_s=second,
            groups=30 * (said // 5),
        )
        rates.append(window.rated(state(second, worker=worker)).tasks[0].workers[0].groups_per_s)
    assert rates[:3] == [None, None, None]
    assert all(each is not None and 4.9 <= each <= 7.6 for each in rates[15:])
    anew = WorkerState("one", role="trainer", uptime_s=0.5, groups=400)
    assert window.rated(state(40, worker=anew)).tasks[0].workers[0].groups_per_s is None
    dead = WorkerState("one", role="trainer", uptime_s=1.5, groups=401, life="dead")
    assert window.rated(state(41, worker=dead)).tasks[0].workers[0].groups_per_s == 0.0


def test_a_worker_that_announces_nothing_for_ten_seconds_has_no_rate() -> None:
    window, rates = RateWindow(), []
    for second in range(16):
        seen = max(0, second - 4)
        worker = WorkerState(
            name="one",
            role="maker",
            life="silent" if seen > 5 else "live",
            seen_s=seen,
            uptime_s=second,
            groups=3 * (second - seen),
        )
        rates.append(window.rated(state(second, worker=worker)).tasks[0].workers[0].groups_per_s)
    assert rates[1:14] == [3.0] * 13
    assert rates[14:] == [0.0, 0.0]
    [seen_first] = RateWindow().rated(state(15, worker=worker)).tasks[0].workers
    assert seen_first.groups_per_s == 0.0
