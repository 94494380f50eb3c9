"""redrb: a Redis-backed streaming experience store for reinforcement-learning post-training.

Makers put experience in, trainers take full, padded batches and acknowledge them after the
optimizer step, new weights go back to the makers. Names are loaded at their first use, so that
`import redrb` is cheap and the commands start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from redrb import errors
from redrb.errors import (
    BatchTimeout,
    ConfigError,
    DecodeError,
    EncodeError,
    LeaseLost,
    PublisherFenced,
    RankLost,
    RecordError,
    RedrbError,
    SendFailed,
    StoreClosed,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TaskMismatch,
    UnsupportedServer,
    WeightCorrupt,
    WeightError,
    WeightMismatch,
    WeightsTorn,
    WeightTimeout,
    WrongStep,
)

if TYPE_CHECKING:
    from redrb.connection import Client, connect
    from redrb.experience import (
        BufferItem,
        Experience,
        Status,
        make_experience_batch,
        split_experience_batch,
    )
    from redrb.replay import ReplayBuffer
    from redrb.runtime import (
        DDPStrategy,
        DetachedGRPOTrainer,
        DetachedPPOTrainer,
        DetachedReplayBuffer,
        DetachedTrainer,
        ExperienceMakerHolder,
        ExperienceMakerPerformanceEvaluator,
        GRPOMakerHolder,
        MakerCallback,
        Strategy,
        TrainerCallback,
        TrainerPerformanceEvaluator,
    )
    from redrb.stream import (
        DeadLetter,
        ExperienceStream,
        Lease,
        Ledger,
        RateLimit,
        SavedTask,
        StalenessReport,
        StoredGroup,
        StreamStats,
        finite_rewards,
        reward_variance,
    )
    from redrb.stream.exchange import export_task, import_task
    from redrb.stream.feeding import ExperienceDataset, ExperienceLoader
    from redrb.stream.mixture import Mixture, MixtureLease, Starvation
    from redrb.stream.sending import ExperienceSender
    from redrb.weights import LoraConfig, WeightPublisher, WeightSubscriber, WeightVersion
    from redrb.weights.files.adapter_folder import load_adapter, save_adapter
    from redrb.weights.files.safetensors import (
        iterate_safetensors,
        load_safetensors,
        save_safetensors,
    )
    from redrb.weights.tensors.shard import TensorShard

__version__ = "0.1.0"

__all__ = [
    "BatchTimeout",
    "BufferItem",
    "Client",
    "ConfigError",
    "DDPStrategy",
    "DeadLetter",
    "DecodeError",
    "DetachedGRPOTrainer",
    "DetachedPPOTrainer",
    "DetachedReplayBuffer",
    "DetachedTrainer",
    "EncodeError",
    "Experience",
    "ExperienceDataset",
    "ExperienceLoader",
    "ExperienceMakerHolder",
    "ExperienceMakerPerformanceEvaluator",
    "ExperienceSender",
    "ExperienceStream",
    "GRPOMakerHolder",
    "Lease",
    "LeaseLost",
    "Ledger",
    "LoraConfig",
    "MakerCallback",
    "Mixture",
    "MixtureLease",
    "PublisherFenced",
    "RankLost",
    "RateLimit",
    "RecordError",
    "RedrbError",
    "ReplayBuffer",
    "SavedTask",
    "SendFailed",
    "StalenessReport",
    "Starvation",
    "Status",
    "StoreClosed",
    "StoreDenied",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "StoredGroup",
    "Strategy",
    "StreamStats",
    "TaskMismatch",
    "TensorShard",
    "TrainerCallback",
    "TrainerPerformanceEvaluator",
    "UnsupportedServer",
    "WeightCorrupt",
    "WeightError",
    "WeightMismatch",
    "WeightPublisher",
    "WeightSubscriber",
    "WeightTimeout",
    "WeightVersion",
    "WeightsTorn",
    "WrongStep",
    "connect",
    "errors",
    "export_task",
    "finite_rewards",
    "import_task",
    "iterate_safetensors",
    "load_adapter",
    "load_safetensors",
    "make_experience_batch",
    "reward_variance",
    "save_adapter",
    "save_safetensors",
    "split_experience_batch",
]

_HOMES = {
    "redrb.connection": ("Client", "connect"),
    "redrb.stream.exchange": ("export_task", "import_task"),
    "redrb.experience": (
        "BufferItem",
        "Experience",
        "Status",
        "make_experience_batch",
        "split_experience_batch",
    ),
    "redrb.stream.feeding": ("ExperienceDataset", "ExperienceLoader"),
    "redrb.stream.mixture": ("Mixture", "MixtureLease", "Starvation"),
    "redrb.replay": ("ReplayBuffer",),
    "redrb.runtime": (
        "DDPStrategy",
        "DetachedGRPOTrainer",
        "DetachedPPOTrainer",
        "DetachedReplayBuffer",
        "DetachedTrainer",
        "ExperienceMakerHolder",
        "ExperienceMakerPerformanceEvaluator",
        "GRPOMakerHolder",
        "MakerCallback",
        "Strategy",
        "TrainerCallback",
        "TrainerPerformanceEvaluator",
    ),
    "redrb.stream.sending": ("ExperienceSender",),
    "redrb.stream": (
        "DeadLetter",
        "ExperienceStream",
        "Lease",
        "Ledger",
        "RateLimit",
        "SavedTask",
        "StalenessReport",
        "StoredGroup",
        "StreamStats",
        "finite_rewards",
        "reward_variance",
    ),
    "redrb.weights": ("LoraConfig", "WeightPublisher", "WeightSubscriber", "WeightVersion"),
    "redrb.weights.files.adapter_folder": ("load_adapter", "save_adapter"),
    "redrb.weights.files.safetensors": (
        "iterate_safetensors",
        "load_safetensors",
        "save_safetensors",
    ),
    "redrb.weights.tensors.shard": ("TensorShard",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Load a public name at its first use."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'redrb' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
