"""Stand-ins for what redrb's plug for XTuner meets: configurations, rollouts and a manager.

They have the fields and make the calls of the originals (InternLM/xtuner, August 2026, b934f46),
which `tests/peers` runs.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from redrb.compat.xtuner import ReplayBuffer


class Status(Enum):
    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"


class RolloutState(BaseModel):
    """Some fields of `xtuner/v1/data_proto/rl_data.py`, RolloutState."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    rollout_id: int | None = None
    group_id: int | None = None
    status: Status = Status.COMPLETED
    prompt_ids: list[int] | None = None
    tokens: list[int] | None = None
    response_ids: list[int] | None = None
    response_model_steps: list[int] | None = None
    seq_staleness: int = 0
    extra_fields: dict[str, Any] = Field(default_factory=dict)


class SyncReplayBufferConfig(BaseModel):
    """`xtuner/v1/rl/replay_buffer.py:693`."""

    model_config = ConfigDict(extra="forbid")


class AsyncReplayBufferConfig(BaseModel):
    """`xtuner/v1/rl/replay_buffer.py:716`."""

    model_config = ConfigDict(extra="forbid")


class TrainerConfig(BaseModel):
    """The plug of `xtuner/v1/train/rl_trainer.py:341`."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    replay_buffer_config: SyncReplayBufferConfig | AsyncReplayBufferConfig = (
        SyncReplayBufferConfig()
    )


class Sampler:
    """Prompts 0, 1, ...; its place is saved as `agent_loop_manager/sampler.py:139` does."""

    def __init__(self) -> None:
        self.place = 0

    def save(self, folder: Path) -> None:
        (folder / "dataloader").write_text(str(self.place))

    def resume(self, folder: Path) -> None:
        self.place = int((folder / "dataloader").read_text())


class Manager:
    """Saves and resumes as `agent_loop_manager/agent_loop_manager.py:306` and `:341` do."""

    def __init__(self, replay_buffer: ReplayBuffer) -> None:
        self.replay_buffer = replay_buffer
        self.sampler = Sampler()

    async def save(
        self, checkpoint_path: Path, model_step: int, *, no_save_replay_buffer: bool = False
    ) -> None:
        checkpoint_path.mkdir(parents=True, exist_ok=True)
        self.sampler.save(checkpoint_path)
        if not no_save_replay_buffer:
            await self.replay_buffer.save(checkpoint_path)
        state = {"model_step": model_step, "replay_buffer_saved": not no_save_replay_buffer}
        (checkpoint_path / "agent_loop_manager_state.json").write_text(json.dumps(state))

    async def resume(self, checkpoint_path: Path) -> int:
        self.sampler.resume(checkpoint_path)
        state = json.loads((checkpoint_path / "agent_loop_manager_state.json").read_text())
        if state["replay_buffer_saved"]:
            await self.replay_buffer.resume(checkpoint_path)
        elif len(self.replay_buffer) > 0:
            raise RuntimeError(
                "Cannot resume without replay buffer checkpoint into a non-empty buffer"
            )
        return int(state["model_step"])


released: list[Any] = []
"""Groups whose trace sessions were released."""


async def release_and_discard_rollout_groups(groups: list[list[Any]]) -> None:
    """As that of `xtuner/v1/rl/rollout/trace_store.py`."""
    released.extend(groups)


def stand_ins() -> dict[str, ModuleType]:
    """Return XTuner's modules by name."""
    modules: dict[str, Any] = {
        name: ModuleType(name)
        for name in (
            "xtuner.v1.rl.replay_buffer",
            "xtuner.v1.data_proto.rl_data",
            "xtuner.v1.rl.rollout.trace_store",
        )
    }
    modules["xtuner.v1.rl.replay_buffer"].SyncReplayBufferConfig = SyncReplayBufferConfig
    modules["xtuner.v1.rl.replay_buffer"].AsyncReplayBufferConfig = AsyncReplayBufferConfig
    modules["xtuner.v1.data_proto.rl_data"].RolloutState = RolloutState
    modules[
        "xtuner.v1.rl.rollout.trace_store"
    ].release_and_discard_rollout_groups = release_and_discard_rollout_groups
    return modules
