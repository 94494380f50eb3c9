"""XTuner's replay buffer on Redis: every behaviour of its interface, in both orders."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import random
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from redrb import ConfigError, ExperienceStream, Status, TaskMismatch
from redrb.compat.xtuner import ReplayBuffer, RolloutReader, rollout_sample, tasks
from redrb.compat.xtuner.rollout_packing import pack_group
from redrb.compat.xtuner.taking import release
from redrb.connection import Client
from redrb.errors import DecodeError, RecordError, StoreError
from redrb.keys import replay_key
from redrb.stream.saving import resuming, saving
from redrb.stream.saving.resuming import read_directory
from redrb.stream.take.rollout_reading import ROLLOUT
from redrb.stream.task.removal import remove_task
from redrb.stream.task.store import TaskStore
from tests.audit import audit
from tests.samples import numbered


@dataclass
class Rollout:
    """A rollout of a user's class."""

    rollout_id: int
    group_id: int = 0
    status: Status = Status.COMPLETED
    prompt_ids: list[int] | None = field(default_factory=lambda: [1, 2])
    tokens: list[int] | None = field(default_factory=lambda: [1, 2, 3, 4])
    response: str | None = "answer"
    response_ids: list[int] | None = field(default_factory=lambda: [3, 4])
    response_model_steps: list[int] | None = None
    response_mask: list[int] | None = None
    logprobs: list[float] | None = field(default_factory=lambda: [-0.1, -0.2])
    reward: dict[str, float] | None = field(default_factory=lambda: {"score": 1.0})
    error_msg: str | None = None
    routed_experts: Any = None
    finish_reason: str | None = "stop"
    seq_staleness: int = 0
    mm_info: dict[str, Any] | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)
    input_ids: list[int] | None = None
    labels: list[int] | None = None


def as_object(number: int, **fields: Any) -> Rollout:
    return Rollout(number, **fields)


def as_dict(number: int, **fields: Any) -> dict[str, Any]:
    return dict(vars(Rollout(number, **fields)))


Make = Callable[..., Any]


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Make:
    """What makes a rollout: a dict, or an object of a class where a test asks for it."""
    function: Make = getattr(request, "param", as_dict)
    return function


@pytest.fixture
def order(request: pytest.FixtureRequest) -> Any:
    return getattr(request, "param", "fifo")


BOTH_KINDS = pytest.mark.parametrize("make", [as_object, as_dict], indirect=True)
BOTH_ORDERS = pytest.mark.parametrize("order", ["fifo", "stalest"], indirect=True)


def of(rollout: Any, name: str) -> Any:
    return rollout[name] if isinstance(rollout, dict) else getattr(rollout, name)


def ids(groups: list[list[Any]]) -> list[list[int]]:
    return [[of(rollout, "rollout_id") for rollout in group] for group in groups]


@pytest.fixture
def rollout_type(make: Make) -> type | None:
    """The class that `make` makes; None: dicts."""
    return Rollout if make is as_object else None


@pytest.fixture
def play(client: Client, namespace: str, rollout_type: type | None) -> Callable[..., None]:
    """Run a scenario with a buffer, then check that the books of all its tasks balance."""

    def run(scenario: Callable[[ReplayBuffer], Awaitable[None]], **options: Any) -> None:
        options = {"rollout_type": rollout_type, **options}

        async def main() -> None:
            async with ReplayBuffer(client, namespace=namespace, **options) as buffer:
                await scenario(buffer)
                await buffer._executor.drain()
                for task in buffer._tasks.names():
                    stream = buffer._tasks.open(task)
                    audit(stream)
                    ledger = stream.stats().ledger
                    assert ledger.balanced
                    assert ledger.leased == 0

        asyncio.run(main())

    return run


@BOTH_ORDERS
def test_tasks_and_statuses_are_apart(play: Any, make: Make, order: Any) -> None:
    async def scenario(buffer: ReplayBuffer) -> None:
        await buffer.put([make(1)], "a")
        await buffer.put([make(2)], "a")
        await buffer.put([make(3, status=Status.FAILED)], "a")
        await buffer.put([make(4)], "b")
        assert await buffer.count("a", Status.COMPLETED) == 2
        assert await buffer.count("a", "failed") == 1
        assert await buffer.count("b", Status.FAILED) == 0
        assert await buffer.count("nowhere", Status.COMPLETED) == 0
        assert await buffer.count_statuses(["a", "b"], [Status.COMPLETED, Status.FAILED]) == {
            "a": {Status.COMPLETED: 2, Status.FAILED: 1},
            "b": {Status.COMPLETED: 1, Status.FAILED: 0},
        }
        assert len(buffer) == await buffer.size() == 4
        assert await buffer.is_ready({"a": 2, "b": 1})
        assert not await buffer.is_ready({"a": 3})
        assert not await buffer.is_ready({"a": 1, "b": 2})
        assert await buffer.is_ready({"a": 1}, group_status=Status.FAILED)
        groups, consumed = await buffer.take_batch({"a": 1, "b": 5, "c": 0, "d": 1})
        assert {task: ids(each) for task, each in groups.items()} == {
            "a": [[1]],
            "b": [[4]],
            "c": [],
            "d": [],
        }
        assert consumed == {"a": 1, "b": 1, "c": 0, "d": 0}
        assert await buffer.count("a", Status.COMPLETED) == 1
        assert await buffer.count("b", Status.COMPLETED) == 0
        assert ids(await buffer.get(9, "a", Status.FAILED)) == [[3]]
        assert ids(await buffer.get(9, "a", Status.COMPLETED)) == [[2]]
        assert await buffer.get(9, "a", Status.COMPLETED) == []
        assert len(buffer) == 0
        assert buffer._tasks.names() == ["a", "b"]  # looking makes no task

    play(scenario, order=order)


def test_an_empty_put_and_get_do_nothing(play: Any, make: Make) -> None:
    async def scenario(buffer: ReplayBuffer) -> None:
        await buffer.put([], "task")
        assert await buffer.get(0, "task", Status.COMPLETED) == []
        assert await buffer.is_ready({"task": 0})
        assert await buffer.is_ready({})
        assert await buffer.take_batch({"task": 0}) == ({"task": []}, {"task": 0})
        assert await buffer.take_batch({}) == ({}, {})
        assert await buffer.refresh_staleness({}, current_train_step=3) == {}
        assert await buffer.refresh_staleness({"task": 1}, current_train_step=3) == {"task": 0}
        assert len(buffer) == 0
        await buffer.put([make(1)], "task")
        assert await buffer.get(0, "task", Status.COMPLETED) == []
        assert await buffer.get(-1, "task", Status.COMPLETED) == []
        assert len(buffer) == 1

    play(scenario)


class Foreign(Enum):
    """XTuner's statuses, as another library has them."""

    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"


def test_statuses_may_be_members_of_any_enum(play: Any, make: Make) -> None:
    async def scenario(buffer: ReplayBuffer) -> None:
        await buffer.put([make(1, status=Foreign.ABORTED, response_model_steps=[0, 0])], "task")
        assert await buffer.count("task", Foreign.ABORTED) == 1
        counts = await buffer.count_statuses(["task"], [Foreign.ABORTED, Foreign.COMPLETED])
        assert counts == {"task": {Foreign.ABORTED: 1, Foreign.COMPLETED: 0}}
        await buffer.refresh_staleness({"task": 1}, current_train_step=9, statuses=["aborted"])
        ((rollout,),) = await buffer.get(1, "task", Foreign.EXPIRED)
        assert of(rollout, "status") == "expired"  # the value; a model would convert it
        with pytest.raises(ConfigError, match="one of redrb"):
            await buffer.get(1, "task", "gone")

    play(scenario)


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (["completed", "completed"], "completed"),
        (["completed", "filtered"], "filtered"),
        (["filtered", "expired"], "expired"),
        (["expired", "aborted"], "aborted"),
        (["aborted", "failed"], "failed"),
    ],
)
def test_a_groups_status_follows_from_its_members(
    play: Any, make: Make, statuses: list[str], expected: str
) -> None:
    async def scenario(buffer: ReplayBuffer) -> None:
        await buffer.put([make(1, status=status) for status in statuses], "task")
        assert await buffer.count("task", expected) == 1
        (group,) = await buffer.get(1, "task", expected)
        assert [of(rollout, "status") for rollout in group] == statuses

    play(scenario)


@BOTH_KINDS
def test_put_updates_the_callers_rollouts(play: Any, make: Make) -> None:
    async def scenario(buffer: ReplayBuffer) -> None:
        rollout = make(1, response_model_steps=[2], seq_staleness=99)
        await buffer.put([rollout], "task", model_step=3, current_train_step=5)
        assert of(rollout, "response_model_steps") == [2, 3]
        assert of(rollout, "seq_staleness") == 2
        ((got,),) = await buffer.get(1, "task", Status.COMPLETED)
        assert got == rollout
        assert type(got) is type(rollout)
        stands = make(2, response_model_steps=[2, 3], seq_staleness=4)
        await buffer.put([stands], "task", model_step=3)
        assert of(stands, "seq_staleness") == 4
        bare = make(3, response_ids=None, seq_staleness=4)
        await buffer.put([bare], "task", model_step=3, current_train_step=9)
        assert of(bare, "seq_staleness") == 0

    play(scenario)


@BOTH_KINDS
def test_every_field_comes_back(play: Any, make: Make) -> None:
    async def scenario(buffer: ReplayBuffer) -> None:
        experts = np.arange(12, dtype=np.int16).reshape(2, 3, 2)
        rollout = make(
            7,
            routed_experts=experts,
            error_msg="none",
            response_mask=[1, 0],
            response_model_steps=[3, 4],
            mm_info={"pixel_values": np.ones((2, 3), np.float32), "grid": [[1, 2]]},
            extra_fields={"train_prompt_ids": [1, 2], "deep": {"er": (1, None)}},
            labels=[-100, 3],
        )
        await buffer.put([rollout, make(8)], "task")
        ((got, other),) = await buffer.get(1, "task", Status.COMPLETED)
        assert of(got, "routed_experts").tolist() == experts.tolist()
        assert of(got, "routed_experts").dtype == experts.dtype
        pixels = of(got, "mm_info")["pixel_values"]
        assert (pixels.dtype, pixels.shape) == (np.float32, (2, 3))
        assert of(got, "mm_info")["grid"] == [[1, 2]]
        assert of(got, "extra_fields") == {"train_prompt_ids": [1, 2], "deep": {"er": (1, None)}}
        for name in ("error_msg", "response_mask", "response_model_steps", "logprobs", "labels"):
            assert of(got, name) == of(rollout, name)
        assert other == make(8)

    play(scenario)


def reset_as_expected(rollout: Any, staleness: int) -> None:
    expected = {
        "status": Status.EXPIRED,
        "seq_staleness": staleness,
        "prompt_ids": [1, 2],
        "tokens": [1, 2],
        "response": "",
        "response_ids": [],
        "response_model_steps": [],
        "response_mask": None,
        "logprobs": [],
        "reward": None,
        "error_msg": None,
        "routed_experts": None,
        "finish_reason": None,
        "extra_fields": {"kept": 1},
    }
    assert {name: of(rollout, name) for name in expected} == expected


FRESH = [Status.COMPLETED, Status.ABORTED]

STALE: dict[str, Any] = {
    "response_model_steps": [1, 1],
    "error_msg": "old",
    "routed_experts": np.ones((2, 2)),
    "extra_fields": {"kept": 1},
}


@BOTH_KINDS
def test_a_group_that_arrives_too_stale_waits_expired(play: Any, make: Make) -> None:
    async def scenario(buffer: ReplayBuffer) -> None:
        old, young = make(1, **STALE), make(2, response_model_steps=[4, 4])
        await buffer.put([old, young], "task", current_train_step=5, stale_threshold=3)
        reset_as_expected(old, 3)
        assert of(young, "status") == Status.COMPLETED
        assert await buffer.count_statuses(["task"], [Status.COMPLETED, Status.EXPIRED]) == {
            "task": {Status.COMPLETED: 0, Status.EXPIRED: 1}
        }
        ((got, fresh),) = await buffer.get(1, "task", Status.EXPIRED)
        reset_as_expected(got, 3)
        assert fresh == young
        assert of(fresh, "response_ids") == [3, 4]
        assert of(fresh, "reward") == {"score": 1.0}

    play(scenario)


def test_a_group_that_is_not_retryable_is_discarded(play: Any, make: Make) -> None:
    async def scenario(buffer: ReplayBuffer) -> None:
        old, young = make(1, **STALE), make(2, response_model_steps=[4, 4])
        await buffer.put(
            [old, young],
            "task",
            current_train_step=5,
            stale_threshold=3,
            expired_groups_retryable=False,
        )
        assert [of(rollout, "status") for rollout in (old, young)] == [
            Status.EXPIRED,
            Status.EXPIRED,
        ]
        assert of(old, "prompt_ids") is of(old, "mm_info") is None
        assert of(old, "extra_fields") == {}
        assert len(buffer) == 0
        assert await buffer.get(1, "task", Status.EXPIRED) == []
        assert buffer._tasks.open("task").stats().ledger.expired == 1

    play(scenario)


@BOTH_KINDS
def test_refresh_expires_groups_that_are_too_stale(play: Any, make: Make) -> None:
    async def scenario(buffer: ReplayBuffer) -> None:
        await buffer.put([make(1, **STALE), make(2, response_model_steps=[3, 3])], "task")
        await buffer.put([make(3, status=Status.ABORTED, response_model_steps=[0, 3])], "task")
        await buffer.put([make(4, response_model_steps=[2, 9])], "task")
        await buffer.put([make(5)], "task")  # no step: never stale
        await buffer.put([make(6, status=Status.FAILED, response_model_steps=[0, 0])], "task")
        assert await buffer.refresh_staleness({"task": 2}, current_train_step=4) == {"task": 2}
        counts = await buffer.refresh_staleness({"task": 2}, current_train_step=4, statuses=FRESH)
        assert counts == {"task": 0}
        assert await buffer.count("task", Status.FAILED) == 1
        expired = {rollout[0][0]: group for rollout, group in _by_ids(await _all_expired(buffer))}
        reset_as_expected(expired[1][0], 2)
        assert of(expired[1][1], "response_ids") == [3, 4]
        assert of(expired[1][1], "status") == Status.COMPLETED
        assert of(expired[1][1], "seq_staleness") == 0
        assert of(expired[3][0], "status") == Status.EXPIRED
        left = await buffer.get(9, "task", Status.COMPLETED)
        assert sorted(ids(left)) == [[4], [5]]
        assert sorted(of(group[0], "seq_staleness") for group in left) == [0, 1]

    play(scenario)


async def _all_expired(buffer: ReplayBuffer) -> list[list[Any]]:
    return await buffer.get(99, "task", Status.EXPIRED)


def _by_ids(groups: list[list[Any]]) -> list[tuple[list[list[int]], list[Any]]]:
    return [(ids([group]), group) for group in groups]


def test_refresh_discards_groups_that_are_not_retryable(play: Any, make: Make) -> None:
    async def scenario(buffer: ReplayBuffer) -> None:
        for task in ("over", "again"):
            await buffer.put([make(1, response_model_steps=[1, 1])], task)
            await buffer.put([make(2, response_model_steps=[3, 3])], task)
        expired = await buffer.refresh_staleness(
            {"over": 2, "again": 2, "unknown": 1},
            expired_groups_retryable_by_task={"over": False, "again": True},
            current_train_step=4,
        )
        assert expired == {"over": 1, "again": 1, "unknown": 0}
        assert await buffer.count("over", Status.EXPIRED) == 0
        assert await buffer.count("again", Status.EXPIRED) == 1
        assert len(buffer) == 3
        assert buffer._tasks.open("over").stats().ledger.expired == 1

    play(scenario)


def test_an_expired_group_may_be_put_again(play: Any, make: Make) -> None:
    async def scenario(buffer: ReplayBuffer) -> None:
        await buffer.put([make(1, **STALE)], "task")
        await buffer.refresh_staleness({"task": 2}, current_train_step=5)
        (group,) = await buffer.get(1, "task", Status.EXPIRED)
        await buffer.put(group, "task")  # the sampler hands it back as it is
        (group,) = await buffer.get(1, "task", Status.EXPIRED)
        reset_as_expected(group[0], 3)
        (rollout,) = group
        fresh = {"response_ids": [9], "response_model_steps": [], "status": Status.COMPLETED}
        for name, value in fresh.items():
            if isinstance(rollout, dict):
                rollout[name] = value
            else:
                setattr(rollout, name, value)
        await buffer.put(group, "task", model_step=4, current_train_step=5, stale_threshold=2)
        ((got,),) = await buffer.get(1, "task", Status.COMPLETED)
        assert (of(got, "response_model_steps"), of(got, "seq_staleness")) == ([4], 0)

    play(scenario)


@pytest.mark.parametrize("hook", [None, "function", "coroutine function"])
def test_expired_groups_that_are_not_retryable_any_more_are_deleted(
    play: Any, make: Make, hook: str | None
) -> None:
    told: list[list[list[Any]]] = []

    async def tell(groups: list[list[Any]]) -> None:
        await asyncio.sleep(0)
        told.append(groups)

    async def scenario(buffer: ReplayBuffer) -> None:
        for number in range(40):  # more than are leased at a time
            await buffer.put([make(number, status="expired"), make(99)], "task")
        await buffer.put([make(40, response_model_steps=[0, 0])], "task")
        await buffer.put([make(41)], "task")
        await buffer.put([make(42, status="expired")], "other")
        discard = {"expired_groups_retryable_by_task": {"task": False}, "current_train_step": 4}
        left = await buffer.refresh_staleness(
            {"task": 2, "other": 2}, statuses=["aborted"], **discard
        )
        assert (left, told) == ({"task": 0, "other": 0}, [])
        assert await buffer.refresh_staleness({"task": 2, "other": 2}, **discard) == {
            "task": 41,
            "other": 1,
        }
        assert [ids(await buffer.get(99, "task", status)) for status in pools] == [[[41]], [], []]
        assert buffer._tasks.open("task").stats().ledger.expired == 41
        assert len(buffer) == 1
        discarded = [sorted(group[0] for group in ids(groups)) for groups in told]
        assert discarded == ([[*range(41)]] if hook else [])

        stream = buffer._tasks.open("task")
        (malformed,) = pack_group([make(43, response_model_steps=[0, 0])])
        for extras in ({}, {ROLLOUT: {"format": 1}, "x": {"$": "unknown"}}):  # of a stream, too
            stream.put([replace(malformed, extras=extras)], priority=0)
        assert (await buffer.refresh_staleness({"task": 2}, **discard)) == {"task": 2}
        assert len(told) == bool(hook)

    pools = ["completed", "aborted", "expired"]
    hooks: dict[Any, Any] = {"function": told.append, "coroutine function": tell}
    play(scenario, on_discard=hooks.get(hook))


@BOTH_KINDS
@pytest.mark.parametrize("limit", [None, 1])
@pytest.mark.parametrize("late", ["field", "tag", "room", "store"])
@pytest.mark.parametrize("retryable", [True, False])
def test_a_put_that_fails_leaves_the_rollouts_as_they_were(
    play: Any,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    limit: int | None,
    late: str,
    *,
    retryable: bool,
) -> None:
    async def scenario(buffer: ReplayBuffer) -> None:
        stream = buffer._tasks.open("task")
        await buffer.put([make(0)], "task")

        def away(*_: Any, **__: Any) -> None:
            raise StoreError("away")

        monkeypatch.setattr(stream, "put", away if late == "store" else stream.put)
        monkeypatch.setattr(stream, "discard_expired", away)
        group = [make(1, **STALE), make(2, response_model_steps=[7])]
        if late == "field":
            group.append(make(3, error_msg=object()))
        before = copy.copy([copy.copy(rollout) for rollout in group])
        putting = asyncio.ensure_future(
            buffer.put(
                group,
                "task",
                model_step=8,
                current_train_step=9,
                stale_threshold=3,
                expired_groups_retryable=retryable,
                **({"level": 3} if late == "tag" else {}),
            )
        )
        if late == "room" and retryable:
            await asyncio.sleep(0)
            for store in buffer._putting.values():
                store.stop()
        with pytest.raises((RecordError, ConfigError, StoreError)):
            await putting
        assert group == before
        assert [list(of(rollout, "response_ids")) for rollout in group[:2]] == [[3, 4], [3, 4]]
        assert len(buffer) == 1

    if late == "room" and limit is None and retryable:
        return  # there is room
    play(scenario, limit=limit)


def test_the_error_of_a_hook_reaches_the_caller_when_the_groups_are_gone(
    play: Any, make: Make
) -> None:
    calls: list[list[list[int]]] = []

    async def tell(groups: list[list[Any]]) -> None:
        calls.append(ids(groups))
        for rollout in groups[0]:  # expired, and not reset yet
            assert of(rollout, "status") == Status.EXPIRED
            assert (of(rollout, "response_ids"), of(rollout, "seq_staleness")) == ([3, 4], 7)
        raise RuntimeError("the trace store is away")

    async def scenario(buffer: ReplayBuffer) -> None:
        own = make(1, **STALE)
        with pytest.raises(RuntimeError, match="away"):
            await buffer.put(
                [own],
                "task",
                current_train_step=9,
                stale_threshold=1,
                expired_groups_retryable=False,
            )
        await buffer.put([make(2, **STALE)], "task")
        with pytest.raises(RuntimeError, match="away"):
            await buffer.refresh_staleness(
                {"task": 1},
                expired_groups_retryable_by_task={"task": False},
                current_train_step=9,
            )
        assert (calls, len(buffer)) == ([[[1]], [[2]]], 0)
        assert of(own, "status") == Status.EXPIRED
        assert buffer._tasks.open("task").stats().ledger.expired == 2

    play(scenario, on_discard=tell)


class Ray:
    """A stand-in for Ray: what a process that runs it has under its name."""

    class ObjectRef:
        def __init__(self, number: int) -> None:
            self.number = number

    def __init__(self, *, runs: bool) -> None:
        self.objects: list[Any] = []
        self.is_initialized = lambda: runs
        self.exceptions = SimpleNamespace(RayError=ArithmeticError)

    def put(self, value: Any) -> ObjectRef:
        self.objects.append(value)
        return self.ObjectRef(len(self.objects) - 1)

    def get(self, reference: ObjectRef, *, timeout: float) -> Any:
        if reference.number >= len(self.objects):
            raise ArithmeticError(f"lost within {timeout} s")
        return self.objects[reference.number]


def with_references(make: Make, ray: Ray, **fields: Any) -> Any:
    """A rollout with ObjectRefs in every place where XTuner has some."""
    return make(
        1,
        routed_experts=[ray.put(np.arange(4)), ray.put(np.arange(2))],
        mm_info={"pixel_values": ray.put(np.ones((2, 3)))},
        extra_fields={"outer": {"inner": (ray.put({"tokens": [11, ray.put("deep")]}),)}},
        **fields,
    )


def test_object_refs_are_resolved_at_put_and_put_back_at_get(
    play: Any, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, other = Ray(runs=True), Ray(runs=True)

    def resolved(value: Any) -> Any:
        if isinstance(value, Ray.ObjectRef):
            return resolved(other.objects[value.number])
        if isinstance(value, dict):
            return {key: resolved(each) for key, each in value.items()}
        return [resolved(each) for each in value] if isinstance(value, list | tuple) else value

    async def scenario(buffer: ReplayBuffer) -> None:
        monkeypatch.setitem(sys.modules, "ray", ray)
        for _ in range(3):
            await buffer.put([with_references(make, ray)], "task")
        monkeypatch.setitem(sys.modules, "ray", other)  # another process
        ((got,),) = await buffer.get(1, "task", "completed")
        assert [type(each) for each in of(got, "routed_experts")] == [Ray.ObjectRef] * 2
        assert type(of(got, "extra_fields")["outer"]["inner"][0]) is Ray.ObjectRef
        monkeypatch.delitem(sys.modules, "ray")  # a process without Ray gets the objects
        ((plain,),) = await buffer.get(1, "task", "completed")
        for rollout in (plain, got):
            assert resolved(of(rollout, "routed_experts"))[0].tolist() == [0, 1, 2, 3]
            assert resolved(of(rollout, "mm_info"))["pixel_values"].shape == (2, 3)
            deep = {"outer": {"inner": [{"tokens": [11, "deep"]}]}}
            assert resolved(of(rollout, "extra_fields")) == deep
        monkeypatch.setitem(sys.modules, "ray", other)
        before = len(other.objects)
        options: dict[str, Any] = {"namespace": buffer._tasks.namespace, "group": "replay"}
        reader = RolloutReader(lambda rollout: rollout_sample({**rollout, "extra_fields": {}}))
        with (
            ExperienceStream(buffer._tasks.client, "task", reader=reader, **options) as stream,
            stream.take(1, timeout=5) as lease,
        ):
            ((sample,),) = lease.groups()
            assert sample.tensors["pixel_values"].shape == (2, 3)
            assert sample.tensors["routed_experts"].tolist() == [1, 2, 3, 0, 1]
        assert len(other.objects) == before

    play(scenario)


@pytest.mark.parametrize(
    ("runs", "said"), [(False, r"resolve a Ray ObjectRef with ray\.get"), (True, "lost within")]
)
def test_object_refs_that_cannot_be_resolved_are_refused(
    play: Any, make: Make, monkeypatch: pytest.MonkeyPatch, said: str, *, runs: bool
) -> None:
    monkeypatch.setitem(sys.modules, "ray", Ray(runs=runs))

    async def scenario(buffer: ReplayBuffer) -> None:
        with pytest.raises(RecordError, match=said):
            await buffer.put([make(1, extra_fields={"x": [Ray.ObjectRef(9)]})], "task")
        assert len(buffer) == 0

    play(scenario)


@pytest.mark.parametrize("name", ["stale_threshold", "token_stale_threshold"])
def test_thresholds_must_be_positive(play: Any, make: Make, name: str) -> None:
    async def scenario(buffer: ReplayBuffer) -> None:
        with pytest.raises(ConfigError, match=name):
            await buffer.put([make(1)], "task", **{name: 0})
        with pytest.raises(ConfigError, match=name):
            await buffer.refresh_staleness(
                {"task": 0 if name == "stale_threshold" else 1},
                task_token_stale_thresholds={"task": 0},
                current_train_step=3,
            )
        for wrong in (-1, 1.5):
            with pytest.raises(ConfigError, match="model_step"):
                await buffer.put([make(1)], "task", model_step=wrong)
        with pytest.raises(ConfigError, match="current_train_step"):
            await buffer.refresh_staleness({"task": 1}, current_train_step=-1)
        assert len(buffer) == 0

    play(scenario)


def test_a_bad_rollout_stores_nothing(play: Any, make: Make) -> None:
    async def scenario(buffer: ReplayBuffer) -> None:
        with pytest.raises(RecordError, match="extra_fields"):
            await buffer.put([make(1), make(2, extra_fields={"x": object()})], "task")
        with pytest.raises(RecordError, match="status"):
            await buffer.put([make(1, status="skipped")], "task")
        assert len(buffer) == 0

    play(scenario)


def test_another_order_is_refused(client: Client, namespace: str) -> None:
    async def main() -> None:
        async with ReplayBuffer(client, namespace=namespace) as buffer:
            await buffer.put([as_dict(1)], "task")
        async with ReplayBuffer(client, namespace=namespace, order="stalest") as other:
            with pytest.raises(TaskMismatch):
                await other.put([as_dict(1)], "task")

    asyncio.run(main())


@pytest.mark.parametrize("wrong", [{"order": "newest"}, {"namespace": "a b"}])
def test_bad_settings_are_refused(client: Client, wrong: Any) -> None:
    with pytest.raises(ConfigError):
        ReplayBuffer(client, **wrong)
    with pytest.raises(ConfigError, match=r"redrb\.connect"):
        ReplayBuffer("redis://localhost")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not a class"):
        ReplayBuffer(client, rollout_type=Rollout(1))  # type: ignore[arg-type]


def test_rollouts_that_the_class_does_not_take_stay_stored(client: Client, namespace: str) -> None:
    async def main() -> None:
        async with ReplayBuffer(client, namespace=namespace) as buffer:
            with pytest.raises(RecordError, match="rollout_type=Rollout"):
                await buffer.put([as_object(1)], "task")
            await buffer.put([as_dict(1)], "task")
            await buffer.put([{**as_dict(2), "more": 3}], "task")
        async with ReplayBuffer(client, namespace=namespace, rollout_type=Rollout) as reader:
            ((got,),) = await reader.get(1, "task", Status.COMPLETED)
            assert got == as_object(1)
            with pytest.raises(ConfigError, match="more"):
                await reader.get(1, "task", Status.COMPLETED)
            with pytest.raises(ConfigError, match="rollout_type"):
                await reader.take_batch({"task": 1})
            assert len(reader) == 1
        async with ReplayBuffer(client, namespace=namespace, rollout_type=dict) as reader:
            await reader.put([as_object(3)], "task")
            groups = await reader.get(2, "task", Status.COMPLETED)
            assert groups == [[{**as_dict(2), "more": 3}], [as_dict(3)]]

    asyncio.run(main())


@BOTH_ORDERS
def test_groups_of_a_stream_are_passed_over_and_stay(play: Any, make: Make, order: Any) -> None:
    async def scenario(buffer: ReplayBuffer) -> None:
        stream = buffer._tasks.open("task")
        stream.put(numbered(5), priority=9)
        await buffer.put([make(1)], "task")
        stream.put(numbered(6), priority=9)
        await buffer.put([make(2)], "task")
        await buffer.put([make(3)], "task")
        assert ids(await buffer.get(2, "task", Status.COMPLETED)) == [[1], [2]]
        assert ids(await buffer.get(2, "task", Status.COMPLETED)) == [[3]]
        assert await buffer.get(2, "task", Status.COMPLETED) == []
        assert await buffer.count("task", Status.COMPLETED) == 2
        assert list(stream.dead_letters()) == []
        stream.clear()

    play(scenario, order=order)


def test_save_resume_and_close_return_while_others_use_the_buffer(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    async def use(buffer: ReplayBuffer, worker: int) -> None:
        while True:
            await buffer.put([as_dict(worker)], f"task{worker % 2}")
            await buffer.get(1, f"task{worker % 2}", "completed")

    async def ask(buffer: ReplayBuffer) -> None:
        while True:
            await buffer.count("task0", "completed")

    async def main() -> None:
        buffer = ReplayBuffer(client, namespace=namespace)
        users = [asyncio.ensure_future(use(buffer, worker)) for worker in range(16)]
        async with asyncio.timeout(30):
            for _ in range(2):
                await buffer.save(tmp_path / "save")
            async with ReplayBuffer(client, namespace=f"{namespace}-copy") as resumed:
                users += [asyncio.ensure_future(ask(resumed)) for _ in range(16)]
                await asyncio.sleep(0)
                await resumed.resume(tmp_path / "save")
            await buffer.close()
            ends = await asyncio.gather(*users, return_exceptions=True)
        assert {type(end) for end in ends} == {ConfigError}, ends
        async with ReplayBuffer(client, namespace=namespace) as after:
            stats = [after._tasks.open(name).stats() for name in after._tasks.names()]
            assert [each.ledger.leased for each in stats] == [0, 0]

    asyncio.run(main())


def test_all_leases_of_a_take_are_ended_when_one_is_lost(client: Client, namespace: str) -> None:
    async def main() -> None:
        async with ReplayBuffer(client, namespace=namespace) as buffer:
            for task in ("a", "b"):
                await buffer.put([as_dict(1)], task)
            taken = buffer._taker.take({"a": 1, "b": 1}, Status.COMPLETED)
            taken["a"].leases[0].release()
            release(taken)
            assert await buffer.size() == 2

    asyncio.run(main())


def test_a_model_of_pydantic_comes_back(play: Any) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Call(pydantic.BaseModel):  # type: ignore[misc,name-defined]
        name: str

    class State(pydantic.BaseModel):  # type: ignore[misc,name-defined]
        model_config = pydantic.ConfigDict(
            extra="allow", validate_assignment=True, arbitrary_types_allowed=True
        )
        rollout_id: int
        status: Status = Status.INIT
        prompt_ids: list[int] | None = None
        tokens: list[int] | None = None
        response_ids: list[int] | None = None
        response_model_steps: list[int] | None = None
        seq_staleness: int = 0
        calls: list[Call] = pydantic.Field(default_factory=list)
        routed_experts: np.ndarray | None = None

    async def scenario(buffer: ReplayBuffer) -> None:
        rollout = State(
            rollout_id=1, status="completed", response_ids=[1, 2], calls=[Call(name="f")]
        )
        rollout.more = {"x": 1}
        await buffer.put([rollout], "task", model_step=1, current_train_step=3)
        assert (rollout.response_model_steps, rollout.seq_staleness) == ([1, 1], 1)
        ((got,),) = await buffer.get(1, "task", Status.COMPLETED)
        assert got == rollout
        assert type(got.calls[0]) is Call
        assert got.more == {"x": 1}
        assert got.model_dump() == rollout.model_dump()
        await buffer.put([got], "task")
        await buffer.refresh_staleness({"task": 1}, current_train_step=9)
        ((late,),) = await buffer.get(1, "task", Status.EXPIRED)
        assert (late.status, late.response_ids, late.seq_staleness) == (Status.EXPIRED, [], 7)

    play(scenario, rollout_type=State)


def test_the_event_loop_goes_on_during_calls(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ExperienceStream.take
    begun, ticked = threading.Event(), threading.Event()

    def take(self: ExperienceStream, *args: Any, **options: Any) -> Any:
        begun.set()
        assert ticked.wait(20), "the event loop stands still during the call"
        return whole(self, *args, **options)

    monkeypatch.setattr(ExperienceStream, "take", take)

    async def scenario(buffer: ReplayBuffer) -> None:
        await buffer.put([as_dict(1)], "task")

        async def tick() -> None:
            while not begun.is_set():
                await asyncio.sleep(0.001)
            for _ in range(100):
                await asyncio.sleep(0.001)
            ticked.set()

        ticking = asyncio.create_task(tick())
        assert len(await buffer.get(1, "task", "completed")) == 1
        await ticking

    play(scenario)


@pytest.mark.parametrize("batch", [False, True])
def test_a_cancelled_get_loses_nothing(
    play: Any, monkeypatch: pytest.MonkeyPatch, *, batch: bool
) -> None:
    began, go_on = threading.Event(), threading.Event()
    take_now = ExperienceStream.take

    def take(self: ExperienceStream, *args: Any, **options: Any) -> Any:
        lease = take_now(self, *args, **options)
        began.set()
        assert go_on.wait(10)
        return lease

    async def scenario(buffer: ReplayBuffer) -> None:
        for task in ("a", "b"):
            await buffer.put([as_dict(1)], task)
            await buffer.put([as_dict(2)], task)
        monkeypatch.setattr(ExperienceStream, "take", take)
        wanted = buffer.take_batch({"a": 2, "b": 1}) if batch else buffer.get(2, "a", "completed")
        getting = asyncio.ensure_future(wanted)
        await asyncio.to_thread(began.wait, 10)
        getting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await getting
        assert await buffer.size() < 4  # they are still held
        go_on.set()
        await buffer._executor.drain()
        assert await buffer.size() == 4
        monkeypatch.setattr(ExperienceStream, "take", take_now)
        assert ids(await buffer.get(9, "a", "completed")) == [[1], [2]]

    play(scenario)


@pytest.fixture
def saved(
    client: Client, namespace: str, tmp_path: Path, rollout_type: type | None
) -> Callable[..., Any]:
    """Put groups, save them, and return a buffer of another namespace that is to resume them."""

    def opened(name: str, order: Any) -> ReplayBuffer:
        return ReplayBuffer(client, namespace=name, order=order, rollout_type=rollout_type)

    async def save(order: Any, groups: list[list[Any]], **options: Any) -> ReplayBuffer:
        async with opened(namespace, order) as buffer:
            for group in groups:
                await buffer.put(group, "task", **options)
            await buffer.put([as_dict(99)], "other/task")
            await buffer.save(tmp_path / "save")
        return opened(f"{namespace}-again", order)

    return save


@pytest.mark.parametrize("lost", ["everything", "the names", "the tasks"])
@pytest.mark.parametrize("opened", [0, 1, 2], ids=["by-the-writer", "by-the-reader", "by-both"])
def test_groups_put_after_redis_lost_data_are_found_listed_and_saved(
    client: Client,
    namespace: str,
    lost: str,
    opened: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`opened`: which buffers, of two processes, knew the task before the loss."""
    keys = {"everything": "*", "the names": "replay}*", "the tasks": "task[}:]*"}
    monkeypatch.setattr(tasks, "ENTER_AGAIN_S", 0.0 if lost == "the names" else 10.0)

    async def main() -> None:
        async with (
            ReplayBuffer(client, namespace=namespace) as writer,
            ReplayBuffer(client, namespace=namespace) as reader,
            ReplayBuffer(client, namespace=f"{namespace}-again") as again,
        ):
            await writer.put([as_dict(0)], "old")
            if opened != 1:  # 1: the writer opens it after the loss
                await writer.put([as_dict(1)], "task")
            if opened:
                await reader.put([as_dict(2)], "task")
            for key in client.execute("KEYS", f"redrb:{{{namespace}:{keys[lost]}"):
                client.execute("DEL", key)
            await writer.put([as_dict(7)], "task")
            counts = [await each.count("task", Status.COMPLETED) for each in (writer, reader)]
            assert counts[0] == counts[1] >= 1
            for each in (writer, reader):
                assert await each.size() == counts[0] + await each.count("old", "completed")
            for each in (writer, reader):
                caplog.clear()
                await each.save(tmp_path / "save")
                warned = "tasks that Redis has lost are not in the save" in caplog.text
                assert warned == (each is writer and lost == "everything")
                assert not warned or "one: 'old'\n" in caplog.text
            await again.resume(tmp_path / "save")
            assert await again.size() == await reader.size()

    asyncio.run(main())


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("deleted", [0, 1, 3], ids=lambda n: f"{n}-deleted-before")
def test_a_buffer_that_redis_has_lost_leaves_the_earlier_save(
    client: Client, namespace: str, tmp_path: Path, count: int, deleted: int
) -> None:
    """`deleted`: tasks that `redrb rm` has deleted, of which nothing is to be saved."""
    names = [f"task-{number}" for number in range(count)]

    async def main() -> None:
        async with ReplayBuffer(client, namespace=namespace) as buffer:
            for number, name in enumerate(names):
                await buffer.put([as_dict(number)], name)
            await buffer.save(tmp_path)
            before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
            for name in names[:deleted]:
                remove_task(client, name, namespace=namespace)
            for name in names[deleted:]:
                for key in client.execute("KEYS", f"redrb:{{{namespace}:{name}*"):
                    client.execute("DEL", key)
            client.execute("DEL", replay_key(namespace))
            if deleted >= count:
                await buffer.save(tmp_path)
                assert read_directory(tmp_path) == {}
                return
            for _ in range(2):
                with pytest.raises(StoreError, match="Redis has lost all tasks") as raised:
                    await buffer.save(tmp_path)
                assert [name for name in names if repr(name) in str(raised.value)] == names[
                    deleted:
                ]
                assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        async with ReplayBuffer(client, namespace=namespace) as again:
            await again.resume(tmp_path)
            assert await again.size() == count

    asyncio.run(main())


@BOTH_KINDS
@BOTH_ORDERS
def test_save_and_resume_keep_order_and_fields(
    saved: Any, make: Make, order: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        groups = [
            [make(number, seq_staleness=stale, response_model_steps=[9 - stale] * 2)]
            for number, stale in enumerate([1, 5, 3])
        ]
        groups.append([make(3, status=Status.FAILED, extra_fields={"x": (1, np.float32(2))})])
        groups.append([make(4, **STALE)])
        async with await saved(order, groups, current_train_step=10, stale_threshold=8) as buffer:
            await buffer.resume(tmp_path / "save")
            assert len(buffer) == 6
            expected = [1, 2, 0] if order == "stalest" else [0, 1, 2]
            got = await buffer.get(9, "task", Status.COMPLETED)
            assert [number for (number,) in ids(got)] == expected
            for (rollout,) in got:
                assert rollout == groups[of(rollout, "rollout_id")][0]
            ((failed,),) = await buffer.get(1, "task", Status.FAILED)
            assert failed == groups[3][0]
            ((expired,),) = await buffer.get(1, "task", Status.EXPIRED)
            reset_as_expected(expired, 8)
            assert ids(await buffer.get(9, "other/task", Status.COMPLETED)) == [[99]]
            await buffer.put([make(7)], "task")
            assert ids(await buffer.get(9, "task", Status.COMPLETED)) == [[7]]

    asyncio.run(main())


@BOTH_ORDERS
def test_resume_into_a_full_buffer_or_another_order_changes_nothing(
    saved: Any, client: Client, namespace: str, order: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with await saved(order, [[as_dict(1)]]) as buffer:
            await buffer.put([as_dict(5)], "third")
            with pytest.raises(ConfigError, match=r"holds 1 group in tasks that .* `redrb rm`"):
                await buffer.resume(tmp_path / "save")
            assert len(buffer) == 1
            assert buffer._tasks.names() == ["third"]
        other: Any = "stalest" if order == "fifo" else "fifo"
        async with ReplayBuffer(client, namespace=f"{namespace}-o", order=other) as buffer:
            with pytest.raises(ConfigError, match="same order"):
                await buffer.resume(tmp_path / "save")
            with pytest.raises(ConfigError, match="holds no"):
                await buffer.resume(tmp_path / "nowhere")
            assert buffer._tasks.names() == []

    asyncio.run(main())


@pytest.mark.parametrize("hook", [5, "tell", [print]])
def test_a_hook_that_cannot_be_called_is_refused_at_once(client: Client, hook: Any) -> None:
    with pytest.raises(ConfigError, match=r"on_discard=.* is no function"):
        ReplayBuffer(client, on_discard=hook)


def test_a_buffer_that_was_emptied_may_resume(
    client: Client, namespace: str, order: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with ReplayBuffer(client, namespace=namespace, order=order) as buffer:
            await buffer.put([as_dict(1)], "task")
            await buffer.save(tmp_path)
            with pytest.raises(ConfigError, match=r"holds 1 groups or .*`redrb rm` deletes it"):
                await buffer.resume(tmp_path)
            assert ids(await buffer.get(9, "task", "completed")) == [[1]]
            await buffer.resume(tmp_path)
            assert len(buffer) == 1
            assert ids(await buffer.get(9, "task", "completed")) == [[1]]

    asyncio.run(main())


def test_a_group_that_is_put_during_a_resume_waits_beside_the_others(
    saved: Any, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with await saved("fifo", [[as_dict(1)], [as_dict(2)]]) as buffer:
            flush = resuming.Resumption._flush

            def late(resumption: Any) -> None:
                flush(resumption)
                if resumption._store.task == "task" and len(buffer) == 2:
                    with buffer._tasks._make("task") as stream:
                        stream.put(pack_group([as_dict(7)]))

            monkeypatch.setattr(resuming.Resumption, "_flush", late)
            monkeypatch.setattr(resuming, "PAGE_GROUPS", 1)
            await buffer.resume(tmp_path / "save")
            assert sorted(ids(await buffer.get(9, "task", "completed"))) == [[1], [2], [7]]
            assert ids(await buffer.get(9, "other/task", "completed")) == [[99]]

    asyncio.run(main())


def test_a_repeated_resume_agrees_unless_the_buffer_was_used(
    saved: Any, tmp_path: Path, order: Any
) -> None:
    async def main() -> None:
        async with await saved(order, [[as_dict(1)], [as_dict(2)]]) as buffer:
            await buffer.resume(tmp_path / "save")
            await buffer.resume(tmp_path / "save")  # as if the reply to the first one was lost
            assert len(buffer) == 3
            await buffer.get(1, "task", "completed")
            with pytest.raises(ConfigError, match="used since"):
                await buffer.resume(tmp_path / "save")
            await buffer.put([as_dict(3)], "task")
            await buffer.get(1, "task", "completed")
            with pytest.raises(ConfigError, match="used since"):
                await buffer.resume(tmp_path / "save")
            assert len(buffer) == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"format": 3}, DecodeError),
        ({"format": 1}, DecodeError),
        ({"files": {"task": "../elsewhere"}}, DecodeError),
        ({"files": {"task": f"{'0' * 32}-0.redrb"}}, ConfigError),
        ({"files": None}, DecodeError),
        (None, DecodeError),
    ],
    ids=repr,
)
def test_a_damaged_save_changes_nothing(
    client: Client, namespace: str, tmp_path: Path, change: Any, error: type[Exception]
) -> None:
    async def main() -> None:
        async with ReplayBuffer(client, namespace=namespace) as buffer:
            await buffer.put([as_dict(1)], "task")
            await buffer.save(tmp_path)
        index = tmp_path / "saved_tasks.json"
        options = json.loads(index.read_text())
        index.write_text("[" if change is None else json.dumps({**options, **change}))
        async with ReplayBuffer(client, namespace=f"{namespace}-2") as again:
            with pytest.raises(error):
                await again.resume(tmp_path)
            assert len(again) == 0

    asyncio.run(main())


def test_a_damaged_file_leaves_the_buffer_empty(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with ReplayBuffer(client, namespace=namespace) as buffer:
            for task in ("a", "b"):
                await buffer.put([as_dict(1)], task)
            await buffer.save(tmp_path)
        files = json.loads((tmp_path / "saved_tasks.json").read_text())["files"]
        damaged = tmp_path / files["b"]
        damaged.write_bytes(damaged.read_bytes()[:-5])
        async with ReplayBuffer(client, namespace=f"{namespace}-2") as again:
            with pytest.raises(DecodeError):
                await again.resume(tmp_path)
            assert len(again) == 0
            await again.put([as_dict(2)], "a")
            assert ids(await again.get(9, "a", "completed")) == [[2]]

    asyncio.run(main())


def test_a_failed_save_leaves_the_earlier_one(
    client: Client, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with ReplayBuffer(client, namespace=namespace) as buffer:
            for task in ("a", "b"):
                await buffer.put([as_dict(1)], task)
            await buffer.save(tmp_path)
            before = sorted(tmp_path.iterdir())
            save = saving.save

            def fail(store: TaskStore, path: Any, **options: Any) -> Any:
                if store.task == "b":
                    raise ConfigError("no space left")
                return save(store, path, **options)

            monkeypatch.setattr(saving, "save", fail)
            with pytest.raises(ConfigError, match="no space"):
                await buffer.save(tmp_path)
            assert sorted(tmp_path.iterdir()) == before
        async with ReplayBuffer(client, namespace=f"{namespace}-2") as again:
            await again.resume(tmp_path)
            assert len(again) == 2

    asyncio.run(main())


def test_a_save_replaces_the_earlier_one(saved: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with await saved("fifo", [[as_dict(1)]]) as buffer:
            await buffer.resume(tmp_path / "save")
            await buffer.get(1, "task", "completed")
            await buffer.save(tmp_path / "save")
            files = sorted(path.suffix for path in (tmp_path / "save").iterdir())
            assert files == [".json", ".redrb", ".redrb"]
            (tmp_path / "file").touch()
            with pytest.raises(ConfigError, match="is a file"):
                await buffer.save(tmp_path / "file")

    asyncio.run(main())


@BOTH_KINDS
def test_groups_that_redis_expired_are_reset_after_resume(
    make: Make,
    rollout_type: type | None,
    order: Any,
    client: Client,
    namespace: str,
    tmp_path: Path,
) -> None:
    options = {"order": order, "rollout_type": rollout_type}

    async def main() -> None:
        async with ReplayBuffer(client, namespace=namespace, **options) as buffer:
            await buffer.put([make(1, **STALE), make(2, response_model_steps=[4, 4])], "task")
            await buffer.refresh_staleness({"task": 3}, current_train_step=5)
            await buffer.put([make(3, response_model_steps=[4, 4])], "task")
            await buffer.refresh_staleness({"task": 3}, current_train_step=6)
            await buffer.put([make(4, response_model_steps=[4, 4])], "task")
            await buffer.save(tmp_path)
        async with ReplayBuffer(client, namespace=f"{namespace}-2", **options) as again:
            await again.resume(tmp_path)
            ((old, young),) = await again.get(1, "task", Status.EXPIRED)
            reset_as_expected(old, 0)  # as the second refresh has left it
            assert of(young, "seq_staleness") == 1
            assert of(young, "response_ids") == [3, 4]
            left = await again.get(9, "task", Status.COMPLETED)
            assert ids(left) == [[3], [4]]
            assert [of(group[0], "seq_staleness") for group in left] == [1, 0]

    asyncio.run(main())


MADE_AGAIN = ("status", "response_ids", "response_model_steps", "response_mask", "labels")


class Walking:
    """XTuner's buffer as it is there: a list that every call walks; by version in the order.

    `tests/peers` compares redrb's buffer with XTuner's own.
    """

    def __init__(self, order: str) -> None:
        self.order, self.newest_step = order, 0
        self.records: list[tuple[str, float, list[dict[str, Any]]]] = []

    @staticmethod
    def stale(rollout: dict[str, Any], step: int) -> int:
        steps = rollout["response_model_steps"]
        return step - min(steps) - 1 if steps else 0

    def expired(
        self, group: list[dict[str, Any]], step: int, limit: int | None, token_limit: int | None
    ) -> list[dict[str, Any]]:
        agentic = any(rollout["labels"] is not None for rollout in group)
        found = []
        for rollout in group:
            steps, ids = rollout["response_model_steps"] or [], rollout["response_ids"]
            mask = rollout["response_mask"]
            by_tokens = not (agentic or token_limit is None or not ids)
            if by_tokens and (mask is None or any(mask)):
                counts = zip(mask or [1] * len(ids), steps, strict=False)
                by_tokens = not any(on and step - at - 1 < token_limit for on, at in counts)
            else:
                by_tokens = False
            if by_tokens or (limit is not None and self.stale(rollout, step) >= limit):
                found.append(rollout)
        return found

    @staticmethod
    def reset(rollout: dict[str, Any]) -> None:
        rollout.update(
            status="expired",
            tokens=list(rollout["prompt_ids"]),
            response="",
            response_ids=[],
            logprobs=[],
            response_model_steps=[],
            **dict.fromkeys(
                ["response_mask", "routed_experts", "finish_reason", "reward", "error_msg"]
            ),
            labels=None,
            input_ids=None,
        )

    @staticmethod
    def status(group: list[dict[str, Any]]) -> str:
        own = [rollout["status"] for rollout in group]
        order = ("failed", "aborted", "expired", "filtered")
        return next((status for status in order if status in own), "completed")

    def age(self, group: list[dict[str, Any]], step: int | None, *limits: Any, keeps: bool) -> str:
        """Refresh a group, reset what expires, and return its status."""
        status = self.status(group)
        if step is None or status in ("failed", "filtered"):
            return status
        before = [rollout for rollout in group if rollout["status"] == "expired"]
        for rollout in group:
            rollout["seq_staleness"] = self.stale(rollout, step)
        expired = [*before, *self.expired(group, step, *limits)]
        for rollout in expired if keeps else ():
            self.reset(rollout)
        for rollout in group if expired and not keeps else ():
            rollout["status"] = "expired"
        return "expired" if expired else status

    def put(self, group: list[dict[str, Any]], step: int | None, *limits: Any, keeps: bool) -> None:
        self.newest_step = max(self.newest_step, step or 0)
        steps = [at for rollout in group for at in rollout["response_model_steps"] or []]
        version: float = min(steps, default=math.inf)
        status = self.age(group, step, *limits, keeps=keeps)
        stored = max(rollout["seq_staleness"] for rollout in group)
        if status in ("failed", "filtered"):
            version = -stored
        elif step is None and stored > 0:
            version = self.newest_step - stored - 1
        if keeps or status != "expired":
            self.records.append((status, version, group))

    def refresh(
        self, step: int | None, *limits: Any, statuses: list[str], keeps: bool
    ) -> tuple[int, list[list[dict[str, Any]]]]:
        """Return how many groups are expired, and those that are discarded."""
        self.newest_step = max(self.newest_step, step or 0)
        count, left, gone = 0, [], []
        for status, version, group in self.records:
            ages = status in statuses and step is not None
            new = self.age(group, step, *limits, keeps=keeps) if ages else status
            expired = new == "expired" and status in statuses
            count += expired
            if keeps or not expired:
                left.append((new, version, group))
            else:
                gone.append(group)
        self.records = left
        return count, gone

    def get(self, size: int, status: str) -> list[list[dict[str, Any]]]:
        found = [record for record in self.records if record[0] == status]
        if self.order == "stalest":
            found.sort(key=lambda record: record[1])
        for record in found[:size]:
            self.records.remove(record)
        return [group for _, _, group in found[:size]]


def random_group(dice: random.Random, number: int, step: int) -> list[dict[str, Any]]:
    def one() -> dict[str, Any]:
        size = dice.randint(0, 3)
        steps = [max(0, step - dice.randint(-1, 6)) for _ in range(dice.choice([size] * 4 + [1]))]
        return as_dict(
            number,
            status=dice.choices([*Status], [8, 8, 4, 1, 1, 2, 1])[0].value,
            response_ids=list(range(size)),
            response_model_steps=dice.choice([steps] * 4 + [None, []]),
            response_mask=dice.choice([None, [dice.randint(0, 1) for _ in range(size)]]),
            labels=dice.choices([None, [1]], [8, 1])[0],
            seq_staleness=dice.randint(0, 3),
        )

    return [one() for _ in range(dice.randint(1, 3))]


def comparable(group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out the staleness of a response that is gone, which XTuner's next refresh sets to 0."""
    return [
        {**rollout, "seq_staleness": None if rollout["status"] == "expired" else at}
        for rollout in group
        for at in [rollout["seq_staleness"]]
    ]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
@BOTH_ORDERS
def test_a_random_sequence_of_calls_equals_a_model_of_xtuners_buffer(
    play: Any, order: Any, seed: int
) -> None:
    """Steps go back, as after a resume, or are missing; thresholds and statuses vary."""
    pools = ["completed", "aborted", "expired", "failed", "filtered"]
    told: list[list[dict[str, Any]]] = []

    async def scenario(buffer: ReplayBuffer) -> None:
        dice, model, newest = random.Random(seed), Walking(order), 6
        again: list[list[dict[str, Any]]] = []
        for number in range(300):
            newest += dice.random() < 0.3
            step = dice.choice([newest] * 5 + [newest - 1, newest - 3, None])
            limits = dice.choice([None, 2, 3, 5, 7]), dice.choice([None, 1, 2, 4, 6])
            keeps = dice.random() < 0.8
            action = dice.choices(["put", "refresh", "get"], [5, 3, 2])[0]
            if action == "put":
                group = again.pop() if again else random_group(dice, number, newest)
                for rollout, other in zip(group, random_group(dice, number, newest), strict=False):
                    if rollout["status"] == "expired" and dice.random() < 0.7:
                        rollout |= {name: other[name] for name in MADE_AGAIN}
                limits = limits if dice.random() < 0.3 else (None, None)
                theirs = copy.deepcopy(group)
                model.put(theirs, step, *limits, keeps=keeps)
                await buffer.put(
                    group,
                    "task",
                    current_train_step=step,
                    stale_threshold=limits[0],
                    token_stale_threshold=limits[1],
                    expired_groups_retryable=keeps,
                )
                if told:
                    assert [each["status"] for each in told.pop()] == ["expired"] * len(group)
                else:
                    assert group == theirs
            elif action == "refresh":
                statuses = dice.choice([None, pools[:2], pools[1:2], pools[2:3], pools])
                expired = await buffer.refresh_staleness(
                    {"task": limits[0]},
                    task_token_stale_thresholds={"task": limits[1]},
                    expired_groups_retryable_by_task={"task": keeps},
                    current_train_step=step,
                    statuses=statuses,
                )
                found, gone = model.refresh(
                    step, *limits, statuses=statuses or pools[:3], keeps=keeps
                )
                assert expired == {"task": found}
                gone = [[{**each, "status": "expired"} for each in group] for group in gone]
                for groups in (told, gone):
                    groups.sort(key=lambda group: group[0]["rollout_id"])
                assert list(map(comparable, told)) == list(map(comparable, gone))
                told.clear()
            else:
                size, status = dice.randint(1, 4), dice.choice(pools)
                got = await buffer.get(size, "task", status)
                assert list(map(comparable, got)) == list(map(comparable, model.get(size, status)))
                again += got if status == "expired" else []
            assert len(buffer) == len(model.records)
        marks = buffer._tasks._marks(buffer._tasks.store("task"))
        assert len(marks) < 20  # of about 90 refreshes

    play(scenario, order=order, on_discard=lambda groups: told.extend(copy.deepcopy(groups)))
