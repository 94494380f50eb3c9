"""`ReplayBuffer`: XTuner v1's asyncio buffer of rollouts, stored in Redis."""

from redrb.compat.xtuner.buffer import ReplayBuffer
from redrb.compat.xtuner.config import ReplayBufferConfig
from redrb.compat.xtuner.rollout_reader import RolloutReader, rollout_sample
from redrb.compat.xtuner.tasks import ReplayOrder

__all__ = ["ReplayBuffer", "ReplayBufferConfig", "ReplayOrder", "RolloutReader", "rollout_sample"]
