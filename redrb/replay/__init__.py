"""`ReplayBuffer`: the asyncio buffer of XTuner v1, over rollouts of the user's own."""

from redrb.replay.buffer import ReplayBuffer

__all__ = ["ReplayBuffer"]
