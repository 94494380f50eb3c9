"""`Stage`: groups get fields from a function and move on; what fails is delivered again."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from redrb import BufferItem, ConfigError, ExperienceStream
from redrb.train import Stage
from tests.audit import audit
from tests.samples import numbered, numbers

Group = list[BufferItem]


@pytest.fixture
def streams(client, namespace):
    with (
        ExperienceStream(client, "rollouts", namespace=namespace, max_deliveries=2) as rollouts,
        ExperienceStream(client, "scored", namespace=namespace) as scored,
    ):
        for stream in (rollouts, scored):
            stream.join_group()
        yield rollouts, scored
        for stream in (rollouts, scored):
            audit(stream)
            assert stream.stats().ledger.balanced


def put(stream: ExperienceStream, *groups: int) -> None:
    stream.put_many([[numbered(n)] for n in groups])


def score(group: Group) -> Group:
    for item in group:
        if item.reward == 3:
            raise ValueError("no score for 3")
        item.tensors["score"] = torch.tensor(2.0)
    return group


async def score_later(group: Group) -> Group:
    await asyncio.sleep(0)
    return score(group)


def score_all(groups: list[Group]) -> list[Group]:
    return [score(group) for group in groups]


async def score_all_later(groups: list[Group]) -> list[Group]:
    return [await score_later(group) for group in groups]


@pytest.mark.parametrize(
    ("function", "batched"),
    [(score, False), (score_later, False), (score_all, True), (score_all_later, True)],
)
def test_a_group_whose_function_raises_becomes_a_dead_letter_and_the_others_move_on(
    streams, function, batched
):
    rollouts, scored = streams
    put(rollouts, *range(5))
    Stage(rollouts, scored, function, batch=5, batched=batched).run(batches=1)
    assert rollouts.stats().ledger.waiting == 1
    Stage(rollouts, scored, function, batched=batched).run(batches=1)
    (letter,) = rollouts.dead_letters()
    assert (letter.exception, letter.message) == ("ValueError", "no score for 3")
    lease = scored.take(4, timeout=0)
    assert numbers(lease) == [0, 1, 2, 4]
    assert [float(item.tensors["score"]) for item in lease.items()] == [2.0] * 4


def test_a_group_that_the_next_task_refuses_fails_alone(streams, caplog):
    rollouts, scored = streams
    put(rollouts, 0, 1, 2, 3)

    def spoil(group):
        if group[0].reward == 1:
            group[0].values = torch.tensor(float("nan"))
        if group[0].reward == 2:
            return "no group"
        return None if group[0].reward == 3 else group

    Stage(rollouts, scored, spoil).run(batches=1)
    assert rollouts.stats().ledger.waiting == 2
    assert (scored.stats().ledger.waiting, scored.stats().ledger.filtered) == (1, 1)
    assert "returned None" in caplog.text


def test_a_batch_with_too_few_results_fails(streams):
    rollouts, scored = streams
    put(rollouts, 0, 1)
    Stage(rollouts, scored, lambda _groups: [], batched=True).run(batches=1)
    assert rollouts.stats().ledger.waiting == 2
    Stage(rollouts, scored, lambda _groups: [], batched=True).run(batches=1)
    assert "returned 0 results for 1 groups" in rollouts.dead_letters()[0].message


def test_a_stage_waits_for_groups_and_ends_when_asked(streams):
    rollouts, scored = streams
    stage = Stage(rollouts, scored, score)
    thread = threading.Thread(target=stage.run)
    thread.start()
    put(rollouts, 0)
    assert numbers(scored.take(1, timeout=20)) == [0]
    stage.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert rollouts.stats().ledger.leased == 0


def test_a_stage_whose_next_task_is_full_ends_when_asked_and_its_groups_wait_again(streams):
    rollouts, scored = streams
    put(rollouts, 0, 1)
    put(scored, 7)
    scored.configure(limit=1)
    stage = Stage(rollouts, scored, lambda group: group, stop_timeout=1.0)
    thread = threading.Thread(target=stage.run)
    thread.start()
    while not scored.stats().producers_waiting:
        assert thread.is_alive()
    stage.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert (rollouts.stats().ledger.waiting, scored.stats().ledger.waiting) == (2, 1)


def test_an_interrupt_releases_the_batch_unharmed(streams):
    rollouts, scored = streams
    put(rollouts, 0, 1)

    def interrupted(group):
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            Stage(rollouts, scored, interrupted).run()
    assert rollouts.stats().ledger.waiting == 2


def test_wrong_arguments_are_refused(streams):
    with pytest.raises(ConfigError, match="give a function"):
        Stage(*streams, "score")
    with pytest.raises(ConfigError, match="cannot be called with one argument"):
        Stage(*streams, lambda group, _: group)
    with pytest.raises(ConfigError, match="without end"):
        Stage(streams[0], streams[0], score)
    with pytest.raises(ConfigError, match="give an ExperienceStream"):
        Stage("rollouts", "scored", score)
    with pytest.raises(ConfigError, match="batch"):
        Stage(*streams, score, batch=0)


@pytest.mark.parametrize("batched", [False, True])
def test_a_group_that_is_too_large_for_the_next_task_fails_alone(client, streams, batched):
    rollouts, scored = streams
    scored.configure(max_bytes=1000)
    put(rollouts, 0, 1, 2)

    def enlarge(group):
        group[0].tensors["big"] = torch.rand(1000 if group[0].reward == 1 else 1)
        return group

    def enlarge_all(groups):
        return [enlarge(group) for group in groups]

    Stage(rollouts, scored, enlarge_all if batched else enlarge, batched=batched).run(batches=1)
    assert numbers(scored.take(2, timeout=0)) == [0, 2]
    (left,) = rollouts.take(1, timeout=0).items()
    assert left.reward == 1


def test_a_task_that_refuses_every_group_leaves_them_unharmed(client, namespace, streams):
    rollouts, _ = streams
    put(rollouts, 0, 1)
    with ExperienceStream(
        client,
        "ordered",
        namespace=namespace,
        order="admission",
        max_staleness=1,
        groups_per_version=4,
        checks=[],
    ) as ordered:
        for _ in range(3):  # more often than max_deliveries
            with pytest.raises(ConfigError, match="orders groups by their rights"):
                Stage(rollouts, ordered, lambda group: group).run(batches=1)
    assert (rollouts.stats().ledger.waiting, rollouts.stats().ledger.dead) == (2, 0)


def test_the_log_has_one_traceback_of_an_error_that_repeats(streams, caplog):
    put(streams[0], 3)
    Stage(*streams, score).run(batches=2)  # max_deliveries
    failures = [record for record in caplog.records if "a stage failed" in record.message]
    assert [record.exc_info is not None for record in failures] == [True, False]


@pytest.mark.parametrize("url", ["fake"], indirect=True)
def test_each_batch_is_an_event(streams):
    events: list[dict[str, Any]] = []

    def write(event, **values):
        events.append({"event": event, **values})

    rollouts, scored = streams
    put(rollouts, 1, 2, 3, 4)
    function = lambda group: None if group[0].reward == 2 else score(group)  # noqa: E731
    Stage(rollouts, scored, function, batch=8, write=write).run(batches=2)
    seconds = {"wait_for_batch_s", "function_s", "forward_s"}
    assert [
        {name: value for name, value in event.items() if name not in seconds} for event in events
    ] == [
        {"event": "stage", "step": 1, "groups": 2, "filtered": 1, "failed": 1},
        {"event": "stage", "step": 2, "groups": 0, "filtered": 0, "failed": 1},
    ]
    assert all(0 <= event[name] < 10 for event in events for name in seconds)


def test_a_batch_that_its_function_changed_before_it_failed_is_read_again(streams):
    rollouts, scored = streams
    put(rollouts, 0, 1)

    def consume(groups):
        if len(groups) > 1:
            groups.clear()
            raise RuntimeError("only one at a time")
        return list(groups)

    Stage(rollouts, scored, consume, batched=True, batch=2).run(batches=1)
    assert sorted(numbers(scored.take(2, timeout=0))) == [0, 1]
