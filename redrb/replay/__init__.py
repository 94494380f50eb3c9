"""`ReplayBuffer`: XTuner v1's asyncio buffer of rollouts, stored in Redis."""

from redrb.replay.buffer import ReplayBuffer
from redrb.replay.rollout_reader import RolloutReader, rollout_sample
from redrb.replay.tasks import ReplayOrder

__all__ = ["ReplayBuffer", "ReplayOrder", "RolloutReader", "rollout_sample"]
