"""XTuner's own trainer configurations and managers on redrb's plug: `make test-peers`.

As a program, `python xtuner_plug.py FOLDER RUN STEPS`, it is a trainer without a model: it resumes
the newest checkpoint, produces and takes batches by XTuner's manager, and saves after every other
step. REDRB_URL and REDRB_NAMESPACE say where.
"""

from __future__ import annotations

import asyncio
import copy
import os
import random
import subprocess
import sys
import uuid
from itertools import count
from pathlib import Path
from typing import Any

import peer_stand_ins  # noqa: F401 (before XTuner, for packages that it does not need here)
import pytest
from pydantic import TypeAdapter, ValidationError
from xtuner.v1.data_proto.rl_data import RolloutState, Status
from xtuner.v1.rl.agent_loop_manager import (
    AgentLoopManager,
    AsyncProduceStrategyConfig,
    DisaggAgentLoopManager,
    DisaggAsyncProduceStrategyConfig,
)
from xtuner.v1.rl.agent_loop_manager.produce_utils import _TaskRunner
from xtuner.v1.rl.agent_loop_manager.sampler import Sampler
from xtuner.v1.rl.replay_buffer import AsyncReplayBufferConfig, SyncReplayBufferConfig
from xtuner.v1.train.rl_trainer import RLColocateTrainerConfig, RLDisaggregatedTrainerConfig

from redrb import ConfigError
from redrb.compat.xtuner import ReplayBufferConfig

BATCH = 2


class Prompts:
    """A dataloader of XTuner with prompts 0, 1, ...

    Attributes:
        place: The next one.
    """

    place = 0

    def __len__(self) -> int:
        return 10**6

    def __iter__(self) -> Any:
        while True:
            self.place += 1
            yield [RolloutState(message=[], prompt_ids=[self.place - 1])]

    def get_state_dict(self) -> dict[str, Any]:
        return {"sampler": {"step": self.place, "epoch": 0}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["sampler"]["step"]


class Loop:
    """An agent loop whose answers are numbered by the process that makes them."""

    def __init__(self) -> None:
        self._numbers = count()

    async def generate_group(self, group: list[RolloutState], **_: Any) -> list[RolloutState]:
        await asyncio.sleep(0)
        made = f"{os.getpid()}.{next(self._numbers)}"
        for state in group:
            state.status, state.response_ids, state.reward = Status.COMPLETED, [1], {"score": 1.0}
            state.extra_fields["made"] = made
        return group


class Controller:
    """A rollout controller that controls nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    async def remote(self, *_: Any) -> None:
        return None


def manager(kind: Any, run: str, namespace: str | None = None) -> Any:
    buffer = ReplayBufferConfig(
        os.environ["REDRB_URL"],
        namespace or os.environ["REDRB_NAMESPACE"],
        order="stalest",
        run=run,
        lease_ms=1000,
    ).build()
    strategy: Any = AsyncProduceStrategyConfig(over_sample_threshold=1.0, max_staleness=9)
    if kind is DisaggAgentLoopManager:
        strategy = DisaggAsyncProduceStrategyConfig()
    sampler = Sampler(Prompts(), 2, buffer)
    return kind([_TaskRunner("math", Loop(), strategy.build(), sampler)], buffer, Controller())


def made_of(groups: list[list[RolloutState]]) -> list[str]:
    return [group[0].extra_fields["made"] for group in groups]


async def train(folder: Path, run: str, steps: int) -> None:
    trained = manager(AgentLoopManager, run)
    newest = folder / "newest"
    done = await trained.resume(Path(newest.read_text())) if newest.exists() else 0
    for step in range(done + 1, done + 1 + steps):
        batch = await trained.produce_batch(BATCH, train_step=step, model_step=step - 1)
        print("took", *made_of(batch.rollout_states), flush=True)
        if step % 2 == 0:
            checkpoint = folder / f"ckpt-step-{step}"
            await trained.save(checkpoint, step, no_save_replay_buffer=run != "")
            newest.write_text(str(checkpoint))
    left = await trained.replay_buffer.get(10**6, "math", Status.COMPLETED)
    print("left", *made_of(left), flush=True)


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> str:
    name = uuid.uuid4().hex
    monkeypatch.setenv("REDRB_NAMESPACE", name)
    return name


def drawn(dice: random.Random, number: int, step: int) -> list[RolloutState]:
    """Return a group whose rollouts may be stale, without steps, or expired."""

    def one() -> RolloutState:
        size = dice.randint(0, 3)
        return RolloutState(
            message=[],
            rollout_id=number,
            prompt_ids=[1, 2],
            tokens=[1, 2, 3],
            status=dice.choices(list(Status), [dice.choice([1, 9]) for _ in Status])[0],
            response_ids=list(range(size)),
            response_model_steps=dice.choice(
                [[max(0, step - dice.randint(-1, 6)) for _ in range(size)]] * 4 + [[]]
            ),
            response_mask=dice.choice([None, [dice.randint(0, 1) for _ in range(size)]]),
            seq_staleness=dice.randint(0, 3),
        )

    return [one() for _ in range(dice.randint(1, 3))]


def fields(groups: list[list[RolloutState]]) -> list[Any]:
    """Return the groups' fields; a reset rollout's staleness is 0 from XTuner's next refresh on."""
    dumped = [[each.model_dump() for each in group] for group in groups]
    for group in dumped:
        for each in group:
            if each["status"] == Status.EXPIRED:
                each["seq_staleness"] = None
    return dumped


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("order", ["fifo", "stalest"])
def test_a_random_sequence_of_calls_equals_xtuners_buffer(
    order: Any, seed: int, namespace: str
) -> None:
    """In the order "stalest" all groups of a status are taken: redrb does not sort them again."""
    kind = SyncReplayBufferConfig if order == "fifo" else AsyncReplayBufferConfig
    dice = random.Random(seed)

    async def play(ours: Any, theirs: Any) -> None:
        newest = 6
        for number in range(300):
            newest += dice.random() < 0.3
            limits = dice.choice([None, 2, 3, 5, 7]), dice.choice([None, 1, 2, 4, 6])
            action = dice.choices(["put", "refresh", "get"], [5, 3, 2])[0]
            step, keeps = dice.choice([newest] * 5 + [newest - 1, newest - 3]), dice.random() < 0.8
            if action == "put":
                groups = [drawn(dice, number, newest)]
                groups.append(copy.deepcopy(groups[0]))
                options: dict[str, Any] = {
                    "model_step": dice.choice([None, newest - 1]),
                    "current_train_step": dice.choice([None, step]),
                    "stale_threshold": limits[0],
                    "token_stale_threshold": limits[1],
                    "expired_groups_retryable": keeps,
                }
                for buffer, group in zip((ours, theirs), groups, strict=True):
                    await buffer.put(group, "math", **options)
                assert fields(groups[:1]) == fields(groups[1:]) or not keeps
            elif action == "refresh":
                statuses = [Status.COMPLETED, Status.ABORTED, Status.EXPIRED]
                options = {
                    "task_stale_thresholds": {"math": limits[0]},
                    "task_token_stale_thresholds": {"math": limits[1]},
                    "expired_groups_retryable_by_task": {"math": keeps},
                    "current_train_step": step,
                    "statuses": dice.choice([None, statuses[:2], statuses[1:2], statuses[2:]]),
                }
                counts = [await each.refresh_staleness(**options) for each in (ours, theirs)]
                assert counts[0] == counts[1]
            else:
                size = dice.randint(1, 4) if order == "fifo" else 10**6
                status = dice.choice(list(Status))
                got = [await each.get(size, "math", status) for each in (ours, theirs)]
                for groups in got if order == "stalest" else ():
                    groups.sort(key=lambda group: group[0].rollout_id)
                assert fields(got[0]) == fields(got[1])
            assert await ours.size() == len(theirs)

    async def scenario() -> None:
        plug = ReplayBufferConfig(os.environ["REDRB_URL"], namespace, order=order)
        async with plug.build() as ours:
            await play(ours, kind().build())

    asyncio.run(scenario())


@pytest.mark.parametrize("order", ["fifo", "stalest"])
@pytest.mark.parametrize("trainer", [RLColocateTrainerConfig, RLDisaggregatedTrainerConfig])
def test_the_trainers_configurations_take_the_plug(trainer: Any, order: Any) -> None:
    plug = ReplayBufferConfig("redis://host", "run7", order=order)
    field = trainer.model_fields["replay_buffer_config"]
    assert TypeAdapter(field.annotation).validate_python(plug) is plug
    for given, refused in ((plug, False), (object(), True)):
        with pytest.raises(ValidationError) as raised:  # of fields that are not given here
            trainer(replay_buffer_config=given)
        assert refused == any(
            "replay_buffer_config" in each["loc"] for each in raised.value.errors()
        )


@pytest.mark.parametrize("kind", [AgentLoopManager, DisaggAgentLoopManager])
@pytest.mark.parametrize("no_save", [False, True])
def test_the_managers_resume_into_a_living_buffer(
    kind: Any, no_save: bool, namespace: str, tmp_path: Path
) -> None:
    run = "exp7" if no_save else ""

    async def main() -> None:
        first = manager(kind, run)
        for number in range(3):
            await first.replay_buffer.put([RolloutState(message=[], rollout_id=number)], "math")
        await first.save(tmp_path, 1, no_save_replay_buffer=no_save)
        second = manager(kind, run)
        assert await second.resume(tmp_path) == 1
        with pytest.raises(ConfigError, match="groups of another run"):
            await manager(kind, "exp8" if no_save else "").replay_buffer.count("math", Status.INIT)
        assert len(second.replay_buffer) == 3

    asyncio.run(main())


@pytest.mark.parametrize("run", ["", "exp7"], ids=["saves-its-buffer", "saves-no-buffer"])
def test_a_trainer_that_is_killed_goes_on_with_what_redis_holds(
    run: str, namespace: str, tmp_path: Path
) -> None:
    command: list[Any] = [sys.executable, __file__, tmp_path, run]
    batches: list[list[str]] = []
    with subprocess.Popen([*command, "100000"], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        for line in killed.stdout:
            batches += [line.split()[1:]] if line.startswith("took") else []
            if len(batches) == 9:
                killed.kill()
    end = subprocess.run([*command, "2"], capture_output=True, text=True, check=True, timeout=120)
    assert "goes on with the" in end.stderr
    lines = [line.split()[1:] for line in end.stdout.splitlines() if line[:4] in ("took", "left")]
    assert len(lines) == 3
    after = [made for line in lines for made in line]
    assert len(after) == len(set(after))
    makers = {made.partition(".")[0] for made in after}
    assert len(makers) == 2
    assert str(killed.pid) in makers
    # only groups that `take_batch` had not removed when the process died
    assert {made for batch in batches for made in batch} & set(after) <= set(batches[-1])


if __name__ == "__main__":
    asyncio.run(train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
