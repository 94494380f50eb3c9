"""Stand-ins for the parts of slime and miles that redrb's adapters import.

They have the fields and the signatures of the originals, which `tests/peers` runs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any


@dataclass
class Sample:
    """Some fields of slime's `Sample`, one of each kind."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        ABORTED = "aborted"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return self.__dict__ | {"status": self.status.value}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Sample:
        return Sample(**{**data, "status": Sample.Status(data["status"])})


class RolloutDataSource:
    """Prompts `p0`, `p1`, ...; an epoch that is shuffled has them in reverse."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.sample_group_index = self.sample_index = self.epoch_id = self.sample_offset = 0
        self.dataset = None
        if args.rollout_global_dataset:
            self.dataset = Prompts(f"p{number}" for number in range(args.prompts))

    def get_samples(self, count: int) -> list[list[Sample]]:
        assert count == 1
        prompt = "" if self.dataset is None else self.dataset.order()[self.sample_offset]
        numbers = (self.sample_index + each for each in range(self.args.n_samples_per_prompt))
        return [[Sample(self.sample_group_index, each, prompt=prompt) for each in numbers]]


class Prompts(list[str]):
    epoch = 0

    def shuffle(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[str]:
        return self[::-1] if self.epoch % 2 else self[:]


@dataclass
class RolloutFnTrainOutput:
    samples: Any
    metrics: dict[str, Any] | None = None


@dataclass
class DataBufferInput:
    prompt_group: list[Sample]
    group: list[Any]


class MetricGatherer:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def on_dynamic_filter_drop(self, reason: str) -> None:
        self.reasons.append(reason)

    def collect(self) -> dict[str, int]:
        return {f"drop_{reason}": self.reasons.count(reason) for reason in self.reasons}


def oldest_version(group: list[Any]) -> int | None:
    flat = [each for member in group for each in (member if isinstance(member, list) else [member])]
    versions = [int(version) for sample in flat for version in sample.weight_versions]
    return min(versions) if versions else None


def load_function(path: str | None) -> Any:
    if path is None:
        return None
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def call_filter(function: Any, *args: Any) -> Any:
    return SimpleNamespace(keep=True) if function is None else function(*args)


def call_rollout_fn(function: Any, *args: Any, evaluation: bool) -> Any:
    return function(*args, evaluation=evaluation)


def stand_ins() -> dict[str, ModuleType]:
    """Return the modules by name."""
    shared = {
        "rollout.base_types": [RolloutFnTrainOutput, call_rollout_fn],
        "rollout.data_source": [RolloutDataSource],
        "utils.misc": [load_function],
        "utils.types": [Sample],
    }
    modules = {}
    for framework in ("slime", "miles"):
        for name, members in shared.items():
            modules[f"{framework}.{name}"] = ModuleType(f"{framework}.{name}")
            vars(modules[f"{framework}.{name}"]).update({each.__name__: each for each in members})
    buffer = modules["miles.rollout.fully_async_data_buffer"] = ModuleType("data_buffer")
    buffer.__dict__.update(
        DataBufferInput=DataBufferInput,
        MetricGatherer=MetricGatherer,
        call_dynamic_filter=call_filter,
        group_oldest_weight_version=oldest_version,
        load_function=load_function,
    )
    return modules


def arguments(url: str, namespace: str, folder: Any, **changes: Any) -> SimpleNamespace:
    """Return what slime and miles give their data sources; checkpoints lie in `folder`."""
    usual = {
        "redrb_url": url,
        "redrb_namespace": namespace,
        "redrb_task": "math",
        "redrb_timeout": 20,
        "rollout_global_dataset": True,
        "prompts": 8,
        "rollout_shuffle": True,
        "n_samples_per_prompt": 2,
        "rollout_batch_size": 2,
        "save_interval": 1,
        "save": str(folder),
        "load": str(folder),
    }
    return SimpleNamespace(**{**usual, **changes})


def install() -> None:
    """Put the stand-ins where `import` finds them, for the rest of the process."""
    sys.modules.update(stand_ins())
