"""Each kind of finding that needs only a state is found in a state with this trouble only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from redrb.stream.task.ledger import AdmissionStats, Ledger, StreamStats
from redrb.watch.state.findings import findings_of
from redrb.watch.state.histogram import Histogram
from redrb.watch.state.model import SEVERITIES, WorkerState
from redrb.watch.state.tasks import with_holdings
from redrb.watch.state.workers import in_order, without_replaced
from tests.finding_kinds import finding_kinds
from tests.sample_state import sample_state
from tests.troubled_states import (
    TROUBLES,
    healthy,
    only,
    with_stats,
    with_task,
    with_waiting,
    with_weights,
    with_worker,
)


def test_a_healthy_state_has_no_findings() -> None:
    assert findings_of(healthy()) == ()


@pytest.mark.parametrize("code", TROUBLES)
def test_a_trouble_is_found_and_no_other(code: str) -> None:
    found = findings_of(TROUBLES[code]())
    assert [finding.code for finding in found] == [code]
    assert found[0].summary
    assert found[0].cause
    assert found[0].subject


def test_every_kind_has_a_state_that_shows_it() -> None:
    assert {*TROUBLES, "connection"} == finding_kinds("state").keys()


def test_findings_come_worst_first_and_in_the_same_order() -> None:
    found = findings_of(sample_state())
    places = [SEVERITIES.index(finding.severity) for finding in found]
    assert places == sorted(places)
    assert len(found) == 5
    assert findings_of(sample_state()) == found


def test_places_in_queues_of_dead_workers_do_not_count() -> None:
    state = only("maker", life="dead", rights=0)
    assert {one.code for one in findings_of(with_stats(state, producers_waiting=3))} == {
        "dead-worker",
        "idle-task",
    }
    state = with_stats(only("trainer", life="dead"), consumers_waiting=1)
    assert {one.code for one in findings_of(state)} == {"dead-worker", "idle-task"}


def test_a_long_step_hangs_only_if_its_trainer_has_ended_another_one_or_has_a_limit() -> None:
    def codes(**worker: float) -> list[str]:
        found = findings_of(with_worker("trainer", **{"leased": 4, "step_s": 1e6, **worker}))
        return [each.code for each in found]

    assert codes() == []
    assert codes(step_limit_s=60.0) == codes(usual_step_s=1.0) == ["hanging-trainer"]
    assert codes(step_s=59.0, usual_step_s=0.1) == []
    assert codes(step_s=599.0, usual_step_s=60.0) == []
    assert codes(step_limit_s=2e6, usual_step_s=1.0) == []
    assert codes(usual_step_s=1.0, leased=0) == []
    state = with_worker("trainer", leased=4, step_s=90.0, usual_step_s=2.0)
    (found,) = findings_of(state)
    worker = next(one for one in state.tasks[0].workers if one.leased == 4 and one.step_s)
    for said in ("90.0 s", "2.0 s", "4 leased groups", str(worker.pid), worker.host, "UTC"):
        assert said in found.summary
    assert worker.name in found.subject


def test_the_advice_about_a_dead_worker_fits_its_program() -> None:
    def command(program: str) -> str:
        (found,) = findings_of(with_worker("maker", life="dead", seen_s=31.0, program=program))
        assert program in found.summary
        return found.command

    assert command("redrb-maker").startswith("redrb-maker RECIPE")
    assert command("redrb.cli.processes.supervised").startswith("redrb-maker RECIPE")
    assert command("train.py") == "python train.py"
    assert command("-c").startswith("ps -o pid,stat,etime,args -p ")


def test_makers_are_not_faster_than_a_trainer_that_hangs() -> None:
    state = with_worker(
        "trainer", leased=4, step_s=300.0, usual_step_s=1.0, waits_for="batch", waits_s=290.0
    )
    found = findings_of(with_stats(state, producers_waiting=3))
    assert [finding.code for finding in found] == ["hanging-trainer"]


def test_many_dead_workers_share_one_finding() -> None:
    workers = tuple(WorkerState(f"m-{i}", role="maker", life="dead") for i in range(200))
    state = with_task(workers=healthy().tasks[0].workers + workers)
    (finding,) = findings_of(state)
    assert finding.subject == "task math"
    assert "200 workers" in finding.summary
    assert "and 195 more" in finding.summary


def test_rights_keep_the_stalest_group_at_the_bound() -> None:
    settings = {"max_staleness": "4", "groups_per_version": "128"}
    assert findings_of(with_waiting(Histogram.of({4: 1}), settings=settings)) == ()


def test_settings_that_are_no_numbers_are_left_alone() -> None:
    settings = {"max_staleness": "9" * 5000, "max_dead": "-1"}
    assert findings_of(with_task(settings=settings)) == ()


def test_a_dead_worker_is_replaced_and_repaired_only_where_nobody_takes_over() -> None:
    one = with_worker("maker", life="dead", seen_s=31.0, rights=3, program="redrb-maker")
    [found] = [each for each in findings_of(one) if each.code == "dead-worker"]
    assert found.command == "redrb-maker RECIPE --task math"
    assert "; it still holds 3 rights" in found.summary
    all_dead = tuple(replace(worker, life="dead") for worker in one.tasks[0].workers)
    alone = replace(one, tasks=(replace(one.tasks[0], workers=all_dead),))
    commands = {each.command for each in findings_of(alone) if each.code == "dead-worker"}
    assert any("--repair" in command for command in commands)


def test_the_order_of_workers_changes_only_with_their_life() -> None:
    workers = [
        WorkerState("h-9-x", role="trainer"),
        WorkerState("h-1-x", role="maker", label="maker-10", seen_s=1.0),
        WorkerState("h-2-x", role="maker", label="maker-2", life="silent"),
        WorkerState("h-3-x", role="maker", life="dead"),
    ]
    for found in (in_order(workers), in_order(reversed(workers))):
        assert [one.name for one in found] == ["h-2-x", "h-1-x", "h-9-x", "h-3-x"]


def test_a_dead_worker_holds_only_what_was_not_taken_back() -> None:
    workers = [
        WorkerState("h-1-aa", role="maker", life="dead", rights=31),
        WorkerState("h-11-bb", role="maker", life="dead", rights=31),
        WorkerState("h-2-cc", role="maker", rights=9),
        WorkerState("h-3-dd", role="trainer", life="dead", leased=4),
        WorkerState("h-4-ee", role="trainer", life="silent", leased=2),
    ]

    def held(makers: dict[str, int], rights: int, leased: int) -> list[int]:
        admission = AdmissionStats(held=rights, makers=makers)
        stats = replace(StreamStats.of({}), admission=admission, ledger=Ledger(leased=leased))
        group = replace(sample_state().tasks[0].groups[0], stats=stats)
        return [one.rights + one.leased for one in with_holdings(workers, [group])]

    assert held({"h-1-zz": 3, "h-2-yy": 5}, 8, 6) == [3, 0, 9, 4, 2]
    assert held({"h-2-yy": 5}, 5, 2) == [0, 0, 9, 0, 2]
    assert held({"h-2-yy": 5}, 7, 3) == [2, 2, 9, 1, 2]  # not all makers are listed
    assert [one.rights for one in with_holdings(workers, [])] == [0, 0, 9, 0, 0]
    for role, left in (("maker", 3), ("trainer", 0)):  # it takes them over, and may not say so yet
        workers[2] = replace(workers[2], role=role)
        assert held({"h-2-yy": 5}, 5, 5)[3] == left


def test_a_stall_names_the_rights_of_dead_makers_and_when_they_return() -> None:
    def found(*late: tuple[str, int, float], life: str = "silent", left: int = 0) -> list[str]:
        admission = AdmissionStats(
            held=sum(rights for _, rights, _ in late),
            waiting=1,
            left=left,
            makers={name: rights for name, rights, _ in late},
            returns_s={name: seconds for name, _, seconds in late},
        )
        waits = with_worker("trainer", waits_for="batch", waits_s=1.0)
        state = with_stats(waits, admission=admission)
        workers = [
            WorkerState(f"{name.rpartition('-')[0]}-worker", role="maker", life=life)
            for name, _, _ in late
        ]
        task = replace(state.tasks[0], workers=(*workers, *state.tasks[0].workers))
        said = findings_of(replace(state, tasks=(task,)))
        return [each.summary for each in said if each.code == "waits-for-dead-maker"]

    (one,) = found(("gpu-1-77-ab", 14, 12.04))
    assert one.startswith(
        "Training waits for 14 rights of the dead maker gpu-1-77-ab; they return in 12.0 s"
    )
    (many,) = found(("gpu-1-77-ab", 14, 12.0), ("gpu-2-78-cd", 1, 20.0))
    assert "15 rights of 2 dead makers, gpu-1-77-ab, gpu-2-78-cd; they return in 20.0 s" in many
    assert found(("gpu-1-77-ab", 14, 12.0), life="live") == []
    assert found() == []


def _worker(
    name: str, life: str, age_s: float, label: str = "", ran_s: float = 1000.0, **more: Any
) -> WorkerState:
    """Return a worker whose start, or whose last heartbeat after `ran_s`, is `age_s` ago."""
    live = {"uptime_s": age_s}
    age = live if life == "live" else {"seen_s": age_s, "uptime_s": age_s + ran_s}
    given: dict[str, Any] = {"role": "maker", "life": life, "label": label or name, "period_s": 2.5}
    return WorkerState(name, **given | age | more)


@pytest.mark.parametrize(
    ("workers", "left"),
    [
        # of the same name: also one that is late, and each that died before
        ([("a", "dead", 31, "1"), ("b", "live", 30, "1")], "b"),
        ([("a", "silent", 20, "1"), ("b", "live", 10, "1")], "b"),
        ([("a", "dead", 90, "1"), ("b", "dead", 60, "1"), ("c", "live", 30, "1")], "c"),
        ([("a", "dead", 31, "1"), ("b", "live", 3600, "1")], "ab"),
        # of other names: each replaces one that is dead
        ([("a", "dead", 31), ("b", "live", 30)], "b"),
        ([("a", "silent", 20), ("b", "live", 10)], "ab"),
        ([("a", "dead", 31), ("b", "live", 3600)], "ab"),
        ([("a", "dead", 90), ("b", "dead", 60), ("c", "live", 30)], "ac"),
        # one that replaced another, and was replaced
        ([("a", "dead", 90), ("b", "dead", 60, "", 20), ("c", "live", 30)], "c"),
        ([("a", "dead", 90), ("b", "dead", 60, "", 20)], "b"),
        ([("a", "dead", 90), ("b", "ended", 60, "", 20)], "b"),
        ([("a", "dead", 40), ("b", "dead", 90), ("c", "live", 80), ("d", "live", 30)], "cd"),
        # one that replaced its own name replaces no other
        ([("a", "dead", 90, "1"), ("b", "dead", 60, "2"), ("c", "live", 30, "2")], "ac"),
    ],
)
def test_replaced_workers_are_not_shown(workers: Sequence[tuple[Any, ...]], left: str) -> None:
    found = without_replaced([_worker(*each) for each in workers])
    assert "".join(each.name for each in found) == left


def test_a_worker_of_another_role_or_host_replaces_none_of_its_name() -> None:
    for other in ({"role": "trainer"}, {"host": "h"}):
        old, late = (_worker("a", life, 20, "1") for life in ("dead", "silent"))
        new = _worker("b", "live", 10, "1", **other)
        for each in (old, late) if "role" in other else (late,):
            assert without_replaced([each, new]) == [each, new]


def test_a_maker_that_waits_may_be_behind() -> None:
    for waits_for in ("right", ""):
        state = with_worker("maker", weight_version=37, behind=5, waits_for=waits_for, waits_s=1.0)
        found = {each.code for each in findings_of(state)}
        assert ("maker-behind" in found) is (waits_for == "")


def test_groups_that_a_late_trainer_holds_are_not_taken_for_too_stale() -> None:
    for life, found in (("live", ["staleness-above-bound"]), ("silent", ["silent-worker"])):
        state = with_worker("trainer", life=life, leased=16, seen_s=9.0)
        [task] = state.tasks
        assert task.main is not None
        old = replace(task.main.staleness, leased=Histogram.of({23: 16}))
        task = replace(task, groups=(replace(task.main, staleness=old),))
        shown = findings_of(replace(state, tasks=(task,)))
        assert [each.code for each in shown if each.severity != "critical"] == found
        assert not any("max_staleness=" in each.command for each in shown)


def test_weights_that_began_anew_are_told_from_slow_makers() -> None:
    state = with_weights(
        with_worker("maker", weights_name="actor", weight_version=3, behind=39), version=3
    )
    [found] = findings_of(state)
    assert (found.code, found.command) == ("weights-behind-task", "redrb rm math")
    assert "actor is 3; the task knows version 42" in found.summary


@pytest.mark.parametrize(
    ("code", "missing"), [("blocked-makers", "trainer"), ("starved-trainer", "maker")]
)
def test_the_programs_of_a_task_are_started_by_the_commands_that_started_them(
    code: str, missing: Any
) -> None:
    state = TROUBLES[code]()
    [task] = state.tasks
    of_redrb = f"redrb-{missing} RECIPE --task math"
    for program, ended, command in (
        ("", "", of_redrb),
        ("redrb-maker", "", of_redrb),
        ("other.py", "", "redrb stats math"),  # no recipe is known here
        ("other.py", "redrb-maker", of_redrb),
        ("other.py", "my program.py", "python 'my program.py'"),
        ("other.py", "jobs.train", "python -m jobs.train"),
        ("other.py", "-c", of_redrb),
    ):
        there = [replace(each, program=program) for each in task.workers]
        gone = replace(there[0], role=missing, life="ended", program=ended, waits_for="")
        older = replace(gone, name="older", program="older.py", seen_s=gone.seen_s + 1)
        workers = (older, *there, gone) if ended else tuple(there)
        changed = replace(task, workers=workers)
        [found] = findings_of(replace(state, tasks=(changed,)))
        assert (found.code, found.command) == (code, command)


@pytest.mark.parametrize(
    ("stuck", "code", "severity"),
    [
        ({"filtered": 16}, "filters-all", "critical"),
        ({"waits_for": "weights", "waits_s": 61.0}, "waits-for-weights", "critical"),
        ({"waits_for": "engine", "waits_s": 21.0}, "waits-for-engine", "warning"),
    ],
)
def test_makers_that_all_put_nothing_are_no_slow_makers(
    stuck: dict[str, Any], code: str, severity: str
) -> None:
    def found(
        *, works: bool, waits_s: float, put: float = 0.0, role: Any = "trainer", none: bool = False
    ) -> dict[str, str]:
        state = with_worker("trainer", waits_for="batch", waits_s=waits_s)
        [task] = state.tasks
        workers = [
            replace(each, role=role)
            if each.role == "trainer"
            else each
            if works and i == 0
            else replace(each, **stuck)
            for i, each in enumerate(task.workers)
            if each.role != "maker" or not none
        ]
        assert task.rates is not None
        rates = replace(task.rates, put=put + 4, filtered=4)
        task = replace(task, workers=tuple(workers), rates=rates)
        return {each.code: each.severity for each in findings_of(replace(state, tasks=(task,)))}

    assert found(works=False, waits_s=500.0) == {code: severity}
    assert found(works=False, waits_s=500.0, role="stage") == {code: severity}
    assert found(works=False, waits_s=1.0) == {code: "warning"}
    unknown = found(works=False, waits_s=500.0, none=True)  # makers that announce nothing
    assert unknown == {"slow-makers": "warning"}
    for more in ({"works": True}, {"works": False, "put": 1.0}):
        assert found(waits_s=500.0, **more) == {"slow-makers": "warning", code: "warning"}


@pytest.mark.parametrize(("puts", "rights"), [(1, 0), (0, 2), (1, 2), (0, 0)])
def test_only_what_waits_is_counted(puts: int, rights: int) -> None:
    admission = AdmissionStats(waiting=rights, most=8)
    state = with_stats(TROUBLES["blocked-makers"](), producers_waiting=puts, admission=admission)
    [found] = findings_of(state)
    assert ("put for room" in found.summary) == (puts > 0)
    assert ("requests for the right" in found.summary) == (rights > 0)
    assert "Waiting: 0" not in found.summary
    assert "limit" not in found.cause


@pytest.mark.parametrize("length", [66, 255, 256])
def test_an_address_that_was_cut_is_asked_by_no_command(length: int) -> None:
    engine = "http://proxy:8000/".ljust(length, "v")
    state = with_worker("maker", waits_for="engine", waits_s=21.0, engine=engine, host="h")
    [found] = findings_of(state)
    is_cut = length == 256
    assert found.command == ("redrb stats math" if is_cut else f"curl -i --url {engine}/health")
    assert f" at {engine}{'...' * is_cut} (asked from h) " in found.summary


def test_an_engine_may_be_away_for_a_moment() -> None:
    for waits_s, found in (
        (19.9, []),
        (20.0, ["waits-for-engine"]),
        (2000.0, ["waits-for-engine"]),
    ):
        state = with_worker("maker", waits_for="engine", waits_s=waits_s)
        assert [each.code for each in findings_of(state)] == found
