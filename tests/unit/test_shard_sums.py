"""The sum of the shards of a stream, as those who watch see it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from redrb.experience import Status
from redrb.stream.task.ledger import AdmissionStats, Ledger, PartStats, StreamStats, summed
from redrb.watch.metrics.metric import StateCollector
from redrb.watch.page.feed import view_data
from redrb.watch.state.findings import findings_of
from redrb.watch.state.histogram import Histogram
from redrb.watch.state.history import History
from redrb.watch.state.model import (
    ConsumerGroupState,
    Rates,
    Staleness,
    State,
    TaskState,
    WorkerState,
)
from redrb.watch.state.observer import View
from redrb.watch.state.shards import sums_of


def stats(**figures: Any) -> StreamStats:
    return StreamStats(Ledger(put=5, acked=2, waiting=3), limit=8, version=4, **figures)


def shard(number: int, shards: int = 2, **others: Any) -> TaskState:
    found = ConsumerGroupState(
        "default",
        stats(consumers=number, consumers_waiting=1, waiting={Status.COMPLETED: 3}),
        Staleness(waiting=Histogram.of({number: 2})),
    )
    return TaskState(
        f"math@{number}",
        order="fifo",
        settings={"limit": "8"},
        groups=(found,),
        workers=(worker(f"vm-7-place{number}", waits_s=number),),
        workers_total=1,
        stored_bytes=10,
        rates=Rates(over_s=8 + number, put=1.5),
        shards=shards,
        **others,
    )


def worker(name: str, **said: Any) -> WorkerState:
    figures = {"pid": 7, "groups": 3, "uptime_s": 9.0, "groups_per_s": 1.0, "leased": 2}
    given = {"role": "maker", "label": "m", "metrics": {"reward": 0.5}, "waits_for": "room"}
    return WorkerState(name=name, **(figures | given | said))


def state_of(*tasks: TaskState) -> State:
    return State("n", "here", 1.0, tasks=tasks, tasks_total=len(tasks), sums=sums_of(tasks))


def test_counts_are_added_and_of_what_all_shards_share_the_worst_counts() -> None:
    [found] = sums_of([shard(0), shard(1), TaskState("other"), shard(2)])
    assert (found.name, found.shards, found.order, found.stored_bytes) == ("math@*", 0, "fifo", 30)
    assert found.settings == {"limit": "8"}
    assert found.rates == Rates(over_s=10, put=4.5)
    [group] = found.groups
    assert group.stats == StreamStats(
        Ledger(put=15, acked=6, waiting=9),
        limit=24,
        version=4,
        consumers=2,
        consumers_waiting=1,
        waiting={Status.COMPLETED: 9},
    )
    assert group.staleness.waiting == Histogram.of({0: 2, 1: 2, 2: 2})


def test_a_process_is_one_worker_with_its_worst_life() -> None:
    tasks = [shard(0), shard(1), shard(2)]
    other = worker("vm-8-place", role="trainer")
    tasks[1] = replace(tasks[1], workers=(replace(tasks[1].workers[0], life="silent"), other))
    [found] = sums_of(tasks)
    assert found.workers_total == 2
    both = {each.role: each for each in found.workers}
    assert both["maker"] == worker(
        "vm-7-place2", life="silent", groups=9, leased=6, groups_per_s=3.0, waits_s=2
    )
    assert both["trainer"] == other


def test_a_consumer_group_that_joined_some_shards_is_summed_over_these() -> None:
    critic = ConsumerGroupState("critic", stats())
    two = replace(shard(1), groups=(*shard(1).groups, critic))
    [found] = sums_of([shard(0), two])
    assert [group.name for group in found.groups] == ["default", "critic"]
    assert found.groups[1].stats.ledger.put == 5


@pytest.mark.parametrize("name", ["math@0", "math"])
def test_tasks_that_only_have_such_names_and_shards_that_cannot_be_read_have_no_sum(
    name: str,
) -> None:
    assert sums_of([replace(shard(0, shards=0), name=name), shard(1, shards=0)]) == ()
    assert sums_of([TaskState("math@0", readable=False, shards=2)]) == ()


def test_rights_and_parts_are_added() -> None:
    rights = AdmissionStats(granted=3, held=1, used=2, makers={"a": 1}, returns_s={"a": 2.0})
    more = AdmissionStats(granted=1, held=1, makers={"a": 1}, returns_s={"a": 3.0})
    one = stats(admission=rights, parts=PartStats(begun=2, completed=2))
    found = summed([one, stats(), stats(admission=more)])
    assert found.admission == AdmissionStats(
        granted=4, held=2, used=2, makers={"a": 2}, returns_s={"a": 3.0}
    )
    assert found.parts == PartStats(begun=2, completed=2)


def test_the_sum_is_shown_behind_its_shards_and_is_no_task_of_metrics_and_findings() -> None:
    tasks = [shard(number, shards=11) for number in range(11)]
    state = state_of(*tasks, TaskState("math@turn"), TaskState("mathematics"))
    names = [task.name for task in state.shown]
    assert names[-3:] == ["math@*", "math@turn", "mathematics"]
    assert [task.name for task in state.streams] == names[-3:]
    assert state.task("math@*") == state.sums[0]
    history = History()
    history.add(state)
    assert history.curve("math@*", "put") == [16.5]
    view = View(state=state, number=1)
    data = view_data(view)
    assert [task["name"] for task in data["state"]["tasks"]] == names
    assert data["points"]["math@*"]["waiting"] == [33]
    families = StateCollector(lambda: view, "n").collect()
    samples = [sample.labels.get("task") for each in families for sample in each.samples]
    assert "math@0" in samples
    assert "math@*" not in samples
    assert findings_of(state) == findings_of(replace(state, sums=()))
