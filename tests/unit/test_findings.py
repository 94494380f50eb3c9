"""Each kind of finding that needs only a state is found in a state with this trouble only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from redrb.state.finding import SEVERITIES
from redrb.state.findings import KINDS, connection_finding, findings_of
from redrb.state.findings.wording import worker_command
from redrb.state.histogram import Histogram
from redrb.state.model import State, WorkerState
from tests.sample_state import sample_state


def healthy() -> State:
    """The task of the sample state with all of its troubles removed."""
    state = sample_state()
    task = state.task("math")
    assert task is not None
    assert task.main is not None
    stats = task.main.stats
    ledger = replace(stats.ledger, dead=0, acked=stats.ledger.acked + 2)
    assert stats.admission is not None
    rights = replace(stats.admission, waiting=0)
    stats = replace(stats, ledger=ledger, dead_letters=0, producers_waiting=0, admission=rights)
    workers = tuple(
        replace(
            worker, life="live", weight_version=42, behind=0, waits_for="", waits_s=0.0, metrics={}
        )
        for worker in task.workers
    )
    task = replace(task, groups=(replace(task.main, stats=stats),), workers=workers)
    return replace(state, tasks=(task,), tasks_total=1)


def with_task(**changes: Any) -> State:
    state = healthy()
    return replace(state, tasks=(replace(state.tasks[0], **changes),))


def with_stats(state: State | None = None, **changes: Any) -> State:
    state = state or healthy()
    task = state.tasks[0]
    assert task.main is not None
    group = replace(task.main, stats=replace(task.main.stats, **changes))
    return replace(state, tasks=(replace(task, groups=(group,)),))


def with_ledger(**changes: Any) -> State:
    state = healthy()
    assert state.tasks[0].main is not None
    return with_stats(state, ledger=replace(state.tasks[0].main.stats.ledger, **changes))


def with_waiting(histogram: Histogram, **task: Any) -> State:
    state = with_task(**task)
    main = state.tasks[0].main
    assert main is not None
    group = replace(main, staleness=replace(main.staleness, waiting=histogram))
    return replace(state, tasks=(replace(state.tasks[0], groups=(group,)),))


def with_worker(role: str, **changes: Any) -> State:
    """One worker of this role is changed."""
    workers = list(healthy().tasks[0].workers)
    place = next(i for i, worker in enumerate(workers) if worker.role == role)
    workers[place] = replace(workers[place], **changes)
    return with_task(workers=tuple(workers))


def only(role: str, **changes: Any) -> State:
    """Only workers of this role are left, and nobody puts or takes besides."""
    workers = [replace(w, **changes) for w in healthy().tasks[0].workers if w.role == role]
    return with_stats(
        with_task(workers=tuple(workers), rates=None), makers=0, consumers=0, consumers_waiting=0
    )


def with_server(**changes: Any) -> State:
    state = healthy()
    return replace(state, servers=(replace(state.servers[0], **changes),))


def with_weights(state: State | None = None, **changes: Any) -> State:
    state = state or healthy()
    return replace(state, weights=(replace(state.weights[0], **changes),))


def with_rates(**changes: Any) -> State:
    rates = healthy().tasks[0].rates
    assert rates is not None
    return with_task(rates=replace(rates, **changes))


TROUBLES: dict[str, Callable[[], State]] = {
    "evicts-keys": lambda: with_server(maxmemory_policy="allkeys-lru"),
    "would-evict-keys": lambda: with_server(maxmemory=0, maxmemory_policy="volatile-ttl"),
    "memory-full": lambda: with_server(used_memory=960_000_000),
    "memory-near-limit": lambda: with_server(used_memory=810_000_000),
    "failed-save": lambda: with_server(last_save_ok=False),
    "old-server": lambda: with_server(version="6.2.14"),
    "busy-server": lambda: with_server(cpu_share=0.97),
    "starved-trainer": lambda: only("trainer", waits_for="batch", waits_s=12.0),
    "slow-makers": lambda: with_worker("trainer", waits_for="batch", waits_s=130.0),
    "blocked-makers": lambda: only("maker", waits_for="right", waits_s=11.0),
    "nobody-takes": lambda: only("maker"),
    "idle-task": lambda: only("stage"),
    "full-task": lambda: with_stats(producers_waiting=3),
    "unbalanced-ledger": lambda: with_ledger(acked=11_700),
    "dead-letters": lambda: with_stats(dead_letters=4),
    "growing-dead-letters": lambda: with_stats(with_rates(dead=0.5), dead_letters=4),
    "full-dead-letters": lambda: with_stats(with_task(settings={"max_dead": "9"}), dead_letters=9),
    "unreadable-task": lambda: with_task(readable=False, groups=(), workers=()),
    "unread-tasks": lambda: replace(healthy(), tasks_total=350),
    "dead-worker": lambda: with_worker("maker", life="dead", seen_s=31.0),
    "silent-worker": lambda: with_worker("trainer", life="silent", seen_s=9.0),
    "maker-behind": lambda: with_worker("maker", weight_version=37, behind=5),
    "waits-for-weights": lambda: with_worker("maker", waits_for="weights", waits_s=61.0),
    "mixed-redrb": lambda: with_worker("maker", redrb="0.0.9"),
    "expiring-groups": lambda: with_rates(expired=0.3),
    "staleness-above-bound": lambda: with_waiting(Histogram.of({5: 1})),
    "staleness-at-bound": lambda: with_waiting(
        Histogram.of({4: 1}), settings={"max_staleness": "4"}
    ),
    "unknown-staleness": lambda: with_waiting(Histogram(unknown=511)),
    "expired-pins": lambda: with_weights(expired_pins=2),
    "unused-weights": lambda: with_weights(
        replace(healthy(), tasks=(), tasks_total=0), pins=0, age_s=90_000.0
    ),
    "unreadable-weights": lambda: with_weights(readable=False),
}


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
    assert {*TROUBLES, "connection"} == {kind.code for kind in KINDS}
    assert len(KINDS) == len({kind.code for kind in KINDS})


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


def test_many_dead_workers_share_one_finding() -> None:
    workers = tuple(WorkerState(f"m-{i}", "maker", life="dead") for i in range(200))
    state = with_task(workers=healthy().tasks[0].workers + workers)
    (finding,) = findings_of(state)
    assert finding.subject == "task math"
    assert "200 workers" in finding.summary
    assert "and 195 more" in finding.summary


def test_rights_keep_the_stalest_group_at_the_bound() -> None:
    settings = {"max_staleness": "4", "groups_per_version": "128"}
    assert findings_of(with_waiting(Histogram.of({4: 1}), settings=settings)) == ()


def test_commands_name_the_namespace_and_the_server() -> None:
    state = replace(with_stats(dead_letters=4), namespace="lab")
    assert findings_of(state)[0].command == "redrb dead ls math --namespace lab"
    server = with_server(kind="valkey", address="/run/a b.sock", maxmemory_policy="allkeys-lru")
    command = "valkey-cli -s '/run/a b.sock' CONFIG SET maxmemory-policy noeviction"
    assert findings_of(server)[0].command == command


def test_settings_that_are_no_numbers_are_left_alone() -> None:
    settings = {"max_staleness": "9" * 5000, "max_dead": "-1"}
    assert findings_of(with_task(settings=settings)) == ()


def test_a_failed_look_is_a_critical_finding() -> None:
    finding = connection_finding("redis://h:1/0", "timed out")
    assert finding.severity == "critical"
    assert "redis://h:1/0" in finding.summary


def test_a_dead_worker_is_replaced_and_repaired_only_where_nobody_takes_over() -> None:
    one = with_worker("maker", life="dead", seen_s=31.0, rights=3)
    [found] = [each for each in findings_of(one) if each.code == "dead-worker"]
    assert found.command == "redrb-maker RECIPE --task math"
    all_dead = tuple(replace(worker, life="dead") for worker in one.tasks[0].workers)
    alone = replace(one, tasks=(replace(one.tasks[0], workers=all_dead),))
    commands = {each.command for each in findings_of(alone) if each.code == "dead-worker"}
    assert any("--repair" in command for command in commands)


def test_a_dead_worker_of_the_same_name_and_host_was_replaced() -> None:
    dead = with_worker("maker", life="dead", seen_s=31.0, period_s=2.5, label="maker-1")
    [task] = dead.tasks
    [worker] = [each for each in task.workers if each.life == "dead" and each.label == "maker-1"]
    for uptime_s, replaced in ((30.0, True), (3600.0, False)):
        other = replace(worker, name="other", life="live", seen_s=1.0, uptime_s=uptime_s)
        state = replace(dead, tasks=(replace(task, workers=(worker, other)),))
        assert ("dead-worker" in {each.code for each in findings_of(state)}) is not replaced


def test_a_maker_that_waits_may_be_behind() -> None:
    for waits_for in ("right", ""):
        state = with_worker("maker", weight_version=37, behind=5, waits_for=waits_for, waits_s=1.0)
        found = {each.code for each in findings_of(state)}
        assert ("maker-behind" in found) is (waits_for == "")


def test_a_socket_is_named_by_its_path() -> None:
    command = connection_finding("unix:///run/redis.sock", "timed out").command
    assert command == "redis-cli -s /run/redis.sock PING"


def test_workers_are_started_on_the_task_and_namespace_that_lack_them() -> None:
    starved = replace(only("trainer", waits_for="batch", waits_s=12.0), namespace="lab")
    [found] = findings_of(starved)
    assert found.command == "redrb-maker RECIPE --task math --namespace lab"
    command = worker_command(starved, starved.tasks[0], "stage")
    assert command == "redrb-stage MODULE:FUNCTION --from TASK --to TASK --namespace lab"


def test_a_silent_worker_is_looked_for_on_its_host() -> None:
    silent = findings_of(with_worker("trainer", life="silent", seen_s=9.0))
    [found] = [each for each in silent if each.code == "silent-worker"]
    assert found.command.startswith("ps -o pid,stat,etime,args -p ")
