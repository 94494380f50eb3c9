"""XTuner's trainers plug redrb's buffer in, and a run goes on with what Redis holds of it."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest

from redrb import ConfigError
from redrb.compat.xtuner import ReplayBuffer, ReplayBufferConfig, tasks
from redrb.connection import Client
from redrb.errors import DecodeError
from redrb.keys import replay_run_key
from redrb.stream.saving import resuming
from redrb.stream.task.removal import remove_task
from tests.xtuner_stand_ins import (
    AsyncReplayBufferConfig,
    Manager,
    RolloutState,
    SyncReplayBufferConfig,
    TrainerConfig,
    released,
    stand_ins,
)

Build = Callable[..., ReplayBuffer]


class Killed(Exception):
    """What ends a process in the middle."""


@pytest.fixture
def xtuner(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def build(client: Client, namespace: str) -> Build:
    """Make the buffer of one process: a run without a name, unless it is given."""

    def opened(run: str | None = "", **options: Any) -> ReplayBuffer:
        return ReplayBuffer(client, run=run, **{"namespace": namespace, **options})

    return opened


def group(number: int, model_step: int = 0) -> list[Any]:
    return [{"rollout_id": number, "response_ids": [1], "response_model_steps": [model_step]}]


async def put(buffer: ReplayBuffer, *numbers: int) -> None:
    for number in numbers:
        await buffer.put(group(number), "math")


async def everything(buffer: ReplayBuffer, *names: str) -> list[int]:
    found = [each for task in names or ["math"] for each in await buffer.get(99, task, "completed")]
    return [rollout["rollout_id"] for (rollout,) in found]


def play(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


@pytest.mark.parametrize("order", ["fifo", "stalest"])
@pytest.mark.parametrize("kind", [SyncReplayBufferConfig, AsyncReplayBufferConfig])
@pytest.mark.usefixtures("xtuner")
def test_a_trainers_configuration_takes_the_plug_as_either_kind(
    url: str, namespace: str, order: Any, kind: type
) -> None:
    plug = ReplayBufferConfig(url, namespace, order=order, lease_ms=5000)
    assert isinstance(plug, kind)
    config = TrainerConfig(replay_buffer_config=plug)
    assert config.replay_buffer_config is plug

    async def scenario() -> None:
        state = RolloutState(rollout_id=1, response_ids=[1], response_model_steps=[3])
        buffer: ReplayBuffer = plug.build()
        assert repr(buffer).startswith(f"<redrb.ReplayBuffer {namespace} ({order})")
        async with buffer:
            await buffer.put([state], "math", current_train_step=4)
            assert await buffer.get(1, "math", state.status) == [[state]]
            released.clear()
            dropped = RolloutState(rollout_id=2, response_ids=[1], response_model_steps=[0])
            stale = {"stale_threshold": 1, "expired_groups_retryable": False}
            await buffer.put([dropped], "math", current_train_step=9, **stale)
            assert [[each.rollout_id for each in group] for group in released] == [[2]]

    play(scenario())


@pytest.mark.usefixtures("xtuner")
def test_a_plug_shows_no_password_and_is_copied(namespace: str) -> None:
    plug = ReplayBufferConfig("redis://me:secret@host", namespace, run="exp/7")
    copies = [copy.deepcopy(plug), pickle.loads(pickle.dumps(plug))]
    for each in (plug, plug.model_copy(deep=True), *copies):
        config = TrainerConfig(replay_buffer_config=each)
        for shown in (repr(config), repr(config.model_dump()), each.model_dump_json()):
            assert "secret" not in shown
        assert isinstance(each, SyncReplayBufferConfig)
        assert vars(each) == vars(plug)
        assert (each.url, each.run) == ("redis://me:secret@host", "exp/7")
    with pytest.raises(pydantic.ValidationError):
        TrainerConfig(replay_buffer_config={"url": "redis://host"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"namespace": "a b"},
        {"order": "newest"},
        {"run": "a b"},
        {"run": 7},
        {"run": "x" * 129},
        {"rollout_type": dict},
        {"rollout_type": None},
        {"stale_threshold": 3},
        {"lease_ms": -1},
        {"lease_ms": 99},
        {"lease_ms": "10"},
        {"limit": 0},
        {"tags": "level"},
        {"on_discard": 5},
        {"url": None},
        {"url": ""},
        {"url": 6379},
        {"url": "host"},
        {"url": "http://host"},
    ],
    ids=str,
)
@pytest.mark.usefixtures("xtuner")
def test_a_wrong_plug_is_refused_when_it_is_made(wrong: dict[str, Any], client: Client) -> None:
    with pytest.raises(ConfigError):
        ReplayBufferConfig(**{"url": "redis://host", **wrong})
    if wrong.keys().isdisjoint(["url", "rollout_type", "stale_threshold"]):
        with pytest.raises(ConfigError):
            ReplayBuffer(client, **wrong)


def test_without_xtuner_there_is_no_plug() -> None:
    with pytest.raises(ConfigError, match=r"No module named 'xtuner'.*needs XTuner"):
        ReplayBufferConfig("redis://host")


@pytest.mark.parametrize("run", ["", "exp7"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_run_goes_on_with_what_redis_holds_after_its_checkpoint(
    build: Build, run: str, times: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`times`: resumes, each by another process, of which only the first one had saved."""

    async def scenario() -> None:
        async with build(run) as buffer:
            await put(buffer, *range(4))
            await Manager(buffer).save(tmp_path, 1)
            assert len(await buffer.get(1, "math", "completed")) == 1
            await put(buffer, 4)
        left = [1, 2, 3, 4]
        for number in range(times):
            caplog.clear()
            async with build(run) as buffer:
                assert await Manager(buffer).resume(tmp_path) == 1
                assert f"goes on with the {len(left)} groups that Redis holds" in caplog.text
                await buffer.refresh_staleness({"math": 9}, current_train_step=2)
                (((taken),),) = await buffer.get(1, "math", "completed")
                assert taken["rollout_id"] == left.pop(0)
                await put(buffer, 10 + number)
                left.append(10 + number)
                assert len(buffer) == len(left)
        async with build(run) as buffer:
            await Manager(buffer).resume(tmp_path)
            assert await everything(buffer) == left

    play(scenario())


@pytest.mark.parametrize("run", ["", "exp7"])
def test_a_run_whose_groups_are_all_taken_goes_on_with_none(
    build: Build, run: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with build(run) as buffer:
            await put(buffer, 1, 2)
            await buffer.save(tmp_path)
            assert await everything(buffer) == [1, 2]
        async with build(run) as buffer:
            await buffer.resume(tmp_path)
            assert len(buffer) == 0

    play(scenario())


@pytest.mark.parametrize("run", ["", "exp7"])
@pytest.mark.parametrize("lost", ["Redis", "deleted"])
def test_a_run_whose_tasks_are_gone_is_filled_from_its_checkpoint(
    build: Build,
    client: Client,
    namespace: str,
    run: str,
    lost: str,
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with build(run) as buffer:
            await put(buffer, 1, 2)
            await buffer.save(tmp_path)
            await put(buffer, 3)
        if lost == "deleted":
            remove_task(client, "math", namespace=namespace)
        else:
            for key in client.execute("KEYS", f"redrb:{{{namespace}:*"):
                client.execute("DEL", key)
        for left in ([1, 2, 4], [1, 2, 4, 4]):
            async with build(run) as buffer:
                await buffer.resume(tmp_path)
                await put(buffer, 4)
                assert len(buffer) == len(left)
        async with build(run) as buffer:
            await buffer.resume(tmp_path)
            assert sorted(await everything(buffer)) == left

    play(scenario())


@pytest.mark.parametrize("lost", ["*", "replay}*"], ids=["everything", "the names"])
def test_a_run_is_named_again_after_redis_lost_its_name(
    build: Build,
    client: Client,
    namespace: str,
    lost: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "ENTER_AGAIN_S", 0.0)

    async def scenario() -> None:
        async with build() as buffer:
            await put(buffer, 1)
            await buffer.save(tmp_path)
            for key in client.execute("KEYS", f"redrb:{{{namespace}:{lost}"):
                client.execute("DEL", key)
            await put(buffer, 2)
        async with build() as buffer:
            with pytest.raises(ConfigError, match="groups of another run"):
                await put(buffer, 3)
            await buffer.resume(tmp_path)
            assert await everything(buffer) == ([2] if lost == "*" else [1, 2])

    play(scenario())


USES: dict[str, Callable[[ReplayBuffer, str, Path], Any]] = {
    "put": lambda buffer, task, _: buffer.put(group(1), task),
    "get": lambda buffer, task, _: everything(buffer, task),
    "take_batch": lambda buffer, task, _: buffer.take_batch({task: 1}),
    "count": lambda buffer, task, _: buffer.count(task, "completed"),
    "count_statuses": lambda buffer, task, _: buffer.count_statuses([task], ["completed"]),
    "is_ready": lambda buffer, task, _: buffer.is_ready({task: 1}),
    "refresh": lambda buffer, task, _: buffer.refresh_staleness({task: 1}, current_train_step=5),
    "size": lambda buffer, *_: buffer.size(),
    "save": lambda buffer, _, path: buffer.save(path / "other"),
    "resume": lambda buffer, _, path: buffer.resume(path),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("use", "task", "first", "second"),
    [(use, task, "", "exp8") for use in USES for task in ("math", "missing")]
    + [("put", "math", "", ""), ("get", "math", "exp7", "exp8")],
)
def test_another_run_is_refused_at_each_first_call_with_both_ways_out(
    build: Build,
    client: Client,
    namespace: str,
    use: str,
    first: str,
    second: str,
    task: str,
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with build("exp0", namespace=f"{namespace}-other") as buffer:
            await put(buffer, 9)
            await buffer.save(tmp_path)  # of a run that never was in this namespace
        async with build(first) as buffer:
            await put(buffer, 1, 2)
            owner = client.execute("GET", replay_run_key(namespace)).decode()
        async with build(second) as buffer:
            for _ in range(2):
                with pytest.raises(ConfigError, match="holds 2 groups of another run") as raised:
                    await USES[use](buffer, task, tmp_path)
                for way in (
                    f"{owner!r}",
                    "resume a checkpoint",
                    "run=",
                    "redrb rm",
                    "another name",
                ):
                    assert way in str(raised.value)
            with pytest.raises(ConfigError, match="another run"):
                len(buffer)
        async with build(owner) as buffer:
            assert await everything(buffer) == [1, 2]

    play(scenario())


@pytest.mark.parametrize("second", ["", "exp8"])
def test_another_run_takes_an_empty_buffer_over(build: Build, second: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with build("exp7") as buffer:
            await put(buffer, 1)
            assert await everything(buffer) == [1]
        async with build(second) as buffer:
            await put(buffer, 2)
            await buffer.save(tmp_path)
        async with build("exp7") as buffer:
            with pytest.raises(ConfigError, match="another run"):
                await put(buffer, 3)
        async with build(second) as buffer:
            await buffer.resume(tmp_path)
            assert await everything(buffer) == [2]

    play(scenario())


@pytest.mark.parametrize("second", ["", "exp8"])
@pytest.mark.parametrize("puts_first", [0, 1])
def test_a_namespace_without_groups_is_of_the_run_that_puts_first(
    build: Build, second: str, puts_first: int
) -> None:
    async def scenario() -> None:
        async with build("exp7") as one, build(second) as two:
            buffers = [one, two]
            for _ in range(3):
                assert len(one) == len(two) == 0  # each takes the name over
            first, other = buffers[puts_first], buffers[1 - puts_first]
            await put(first, 1, 2)
            for call in (lambda: put(other, 3), lambda: everything(other)):
                with pytest.raises(ConfigError, match="holds 2 groups of another run"):
                    await call()
            assert await everything(first) == [1, 2]
            await first._executor.drain()  # the groups leave Redis once the caller has them
            await put(other, 4)
            with pytest.raises(ConfigError, match="holds 1 groups of another run"):
                await everything(first)
            assert await everything(other) == [4]

    play(scenario())


@pytest.mark.parametrize("run", ["", "exp7"])
@pytest.mark.parametrize("no_save_replay_buffer", [False, True])
def test_a_run_takes_over_what_makers_put_after_redis_was_lost(
    build: Build,
    client: Client,
    namespace: str,
    run: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    *,
    no_save_replay_buffer: bool,
) -> None:
    async def scenario() -> None:
        async with build(run) as buffer:
            await put(buffer, 1, 2)
            await Manager(buffer).save(tmp_path, 1, no_save_replay_buffer=no_save_replay_buffer)
        for key in client.execute("KEYS", f"redrb:{{{namespace}:*"):
            client.execute("DEL", key)
        async with build(None) as maker:
            await put(maker, 3)
            async with build(run) as buffer:
                assert await Manager(buffer).resume(tmp_path) == 1
                (said,) = [each for each in caplog.messages if "of no run" in each]
                for word in ("takes over 1 groups", "redrb rm", namespace, "resume again"):
                    assert word in said
                await put(maker, 4)
                await put(buffer, 5)
                assert len(buffer) == 3
            async with build("exp8") as other:
                with pytest.raises(ConfigError, match="another run"):
                    await put(other, 6)
            if no_save_replay_buffer:
                return
            async with build(run) as buffer:
                await buffer.resume(tmp_path)
                assert await everything(buffer) == [3, 4, 5]
                remove_task(client, "math", namespace=namespace)
            async with build(run) as buffer:  # as the warning has said
                await buffer.resume(tmp_path)
                assert await everything(buffer) == [1, 2]

    play(scenario())


def test_makers_that_name_the_run_or_none_work_beside_it(build: Build) -> None:
    async def scenario() -> None:
        async with build(None) as maker, build("exp7") as trainer, build("exp7") as other:
            await put(maker, 1)  # before the run began
            await put(trainer, 2)
            await put(other, 3)
            await put(maker, 4)
            assert await everything(trainer) == [1, 2, 3, 4]

    play(scenario())


def test_a_checkpoint_without_a_buffer_is_resumed_by_the_run_of_the_name(
    build: Build, namespace: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with build("exp7") as buffer:
            assert len(buffer) == 0
            await put(buffer, 1, 2)
            assert len(buffer) == 2
            await Manager(buffer).save(tmp_path, 1, no_save_replay_buffer=True)
            await put(buffer, 3)
        for _ in range(2):
            async with build("exp7") as buffer:
                assert await Manager(buffer).resume(tmp_path) == 1
                assert "run 'exp7' goes on with the 3 groups" in caplog.text
                assert len(buffer) == await buffer.size() == 3
        for other in ("", "exp8"):
            async with build(other) as buffer:
                with pytest.raises(ConfigError, match=r"'exp7'.*run="):
                    await Manager(buffer).resume(tmp_path)
        async with build("exp8", namespace=f"{namespace}-empty") as buffer:
            await Manager(buffer).resume(tmp_path)
        async with build("exp7") as buffer:
            assert await everything(buffer) == [1, 2, 3]

    play(scenario())


@pytest.mark.parametrize("run", ["", "exp7"])
@pytest.mark.parametrize("before", ["none", "an emptied run"])
def test_a_resume_that_fails_before_its_end_is_repeated_and_restores_all(
    build: Build,
    namespace: str,
    run: str,
    before: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        name = f"{namespace}-again"
        async with build(run) as buffer:
            await put(buffer, 1, 2)
            await buffer.put(group(3), "code")
            await buffer.save(tmp_path)
        if before != "none":
            async with build("exp6", namespace=name) as buffer:
                await put(buffer, 0)
                await everything(buffer)
        flush = resuming.Resumption._flush
        for puts in (0, 1, 1, 1):  # before the first put, and after each, of both tasks
            done = iter(range(puts))

            def die(resumption: Any, done: Iterator[int] = done) -> None:
                if next(done, None) is None:
                    raise Killed
                flush(resumption)

            with monkeypatch.context() as patched:
                patched.setattr(resuming.Resumption, "_flush", die)
                async with build(run, namespace=name) as buffer:
                    with pytest.raises(Killed):
                        await buffer.resume(tmp_path)
        async with build(run, namespace=name) as buffer:
            await buffer.resume(tmp_path)
            assert await everything(buffer, "math", "code") == [1, 2, 3]

    play(scenario())


def test_tasks_that_redis_has_lost_are_named_when_a_run_goes_on(
    build: Build,
    client: Client,
    namespace: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with build() as buffer:
            await put(buffer, 1)
            await buffer.put(group(2), "code")
            await buffer.put(group(3), "removed")
            await buffer.save(tmp_path)
        remove_task(client, "removed", namespace=namespace)
        for key in client.execute("KEYS", f"redrb:{{{namespace}:code*"):
            client.execute("DEL", key)
        async with build() as buffer:
            await buffer.resume(tmp_path)
            lost = [each for each in caplog.messages if "Redis has lost task" in each]
            assert lost == [f"Redis has lost task 'code', which is not restored: {tmp_path}"]
            assert await everything(buffer, "math", "code", "removed") == [1]

    play(scenario())


@pytest.mark.parametrize("run", ["a b", 7, "x" * 129])
def test_a_run_in_a_damaged_index_is_refused(build: Build, run: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with build() as buffer:
            await put(buffer, 1)
            await buffer.save(tmp_path)
            index = tmp_path / "saved_tasks.json"
            index.write_text(json.dumps(json.loads(index.read_text()) | {"run": run}))
            with pytest.raises(DecodeError, match="no index"):
                await buffer.resume(tmp_path)

    play(scenario())
