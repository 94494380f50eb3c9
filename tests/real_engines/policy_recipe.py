"""A recipe whose makers are `tests.real_engines.workers`: its trainer alone is that of redrb."""

from __future__ import annotations

import os

from redrb.recipe import GRPORecipe


class Policy(GRPORecipe):
    """GRPO on the model in the folder POLICY."""

    task = "math"
    order = "stalest"  # unfinished groups of episodes go back into it
    group_size = 4
    groups = 4
    learning_rate = 1e-3
    truncated_importance = 2.0
    max_new_tokens = 24
    max_staleness = 4
    lease_ms = 3000
    checkpoint_every = 5
    device = "cpu"

    def model(self) -> str:
        """Return the folder of the model."""
        return os.environ["POLICY"]

    def prompts(self) -> list[dict[str, object]]:
        """Return a prompt; makers have their own."""
        return [{"input_ids": [40, 41, 42]}]

    def reward(self, completion: object) -> float:
        """Return nothing of use: makers reward their samples."""
        raise AssertionError(completion)
