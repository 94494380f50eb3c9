"""States of a namespace that is healthy, and of one with a single trouble."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from redrb.stream.task.ledger import AdmissionStats
from redrb.watch.state.histogram import Histogram
from redrb.watch.state.model import State
from tests.sample_state import sample_state


def healthy() -> State:
    """The task of the sample state with all of its troubles removed."""
    state = sample_state()
    task = state.task("math")
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
    group = replace(task.main, stats=replace(task.main.stats, **changes))
    return replace(state, tasks=(replace(task, groups=(group,)),))


def with_ledger(**changes: Any) -> State:
    state = healthy()
    return with_stats(state, ledger=replace(state.tasks[0].main.stats.ledger, **changes))


def with_waiting(histogram: Histogram, **task: Any) -> State:
    state = with_task(**task)
    main = state.tasks[0].main
    group = replace(main, staleness=replace(main.staleness, waiting=histogram))
    return replace(state, tasks=(replace(state.tasks[0], groups=(group,)),))


def with_worker(role: str, **changes: Any) -> State:
    """One worker of this role is changed."""
    workers = list(healthy().tasks[0].workers)
    place = next(i for i, worker in enumerate(workers) if worker.role == role)
    workers[place] = replace(workers[place], **changes)
    return with_task(workers=tuple(workers))


def only(role: str, *, task: str = "math", **changes: Any) -> State:
    """Only workers of this role are left of a task, and nobody puts or takes besides."""
    workers = [replace(w, **changes) for w in healthy().tasks[0].workers if w.role == role]
    return with_stats(
        with_task(name=task, workers=tuple(workers), rates=None),
        makers=0,
        consumers=0,
        consumers_waiting=0,
    )


def with_dead_maker(rights: int, *, returns_s: float) -> State:
    """A trainer waits, and no right is left but those of a maker that was killed."""
    maker = "gpu-04-2001-5f3a"
    held = AdmissionStats(
        granted=rights,
        held=rights,
        waiting=1,
        most=rights,
        makers={maker: rights},
        returns_s={maker: returns_s},
    )
    return with_stats(with_worker("trainer", waits_for="batch", waits_s=3.0), admission=held)


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
    "waits-for-dead-maker": lambda: with_dead_maker(14, returns_s=12.0),
    "blocked-makers": lambda: only("maker", waits_for="right", waits_s=11.0),
    "nobody-takes": lambda: only("maker"),
    "idle-task": lambda: only("stage"),
    "unclaimed-rows": lambda: only("stage", task="train:math"),
    "full-task": lambda: with_stats(producers_waiting=3),
    "unbalanced-ledger": lambda: with_ledger(acked=11_700),
    "dead-letters": lambda: with_stats(dead_letters=4),
    "growing-dead-letters": lambda: with_stats(with_rates(dead=0.5), dead_letters=4),
    "full-dead-letters": lambda: with_stats(with_task(settings={"max_dead": "9"}), dead_letters=9),
    "unreadable-task": lambda: with_task(readable=False, groups=(), workers=()),
    "failed-check": lambda: with_task(readable=False, damage="a bad byte", groups=(), workers=()),
    "unread-tasks": lambda: replace(healthy(), tasks_total=350),
    "dead-worker": lambda: with_worker("maker", life="dead", seen_s=31.0),
    "hanging-trainer": lambda: with_worker("trainer", leased=32, step_s=90.0, usual_step_s=2.0),
    "equal-rewards": lambda: with_worker("trainer", metrics={"reward": 0.0, "equal_rewards": 20.0}),
    "filters-all": lambda: with_worker(
        "maker", filtered=16, fault="the reward raised KeyError: 'x'"
    ),
    "silent-worker": lambda: with_worker("trainer", life="silent", seen_s=9.0),
    "maker-behind": lambda: with_worker("maker", weight_version=37, behind=5),
    "waits-for-weights": lambda: with_worker("maker", waits_for="weights", waits_s=61.0),
    "waits-for-engine": lambda: with_worker("maker", waits_for="engine", waits_s=21.0),
    "mixed-redrb": lambda: with_worker("maker", redrb="0.0.9"),
    "expiring-groups": lambda: with_rates(expired=0.3),
    "staleness-above-bound": lambda: with_waiting(Histogram.of({5: 1})),
    "weights-behind-task": lambda: with_weights(
        with_worker("maker", weights_name="actor"), version=1
    ),
    "staleness-at-bound": lambda: with_waiting(
        Histogram.of({4: 1}), settings={"max_staleness": "4"}
    ),
    "unknown-staleness": lambda: with_waiting(Histogram(unknown=511)),
    "damaged-weights": lambda: with_weights(asked_version=41, asked_key="delta:41:0"),
    "expired-pins": lambda: with_weights(expired_pins=2),
    "unused-weights": lambda: with_weights(
        replace(healthy(), tasks=(), tasks_total=0), pins=0, age_s=90_000.0
    ),
    "unreadable-weights": lambda: with_weights(readable=False),
}
