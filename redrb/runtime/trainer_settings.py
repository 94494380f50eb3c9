"""Settings of `DetachedTrainer` in groups, each checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from redrb.checks import checked_int
from redrb.errors import ConfigError
from redrb.runtime.checkpoint import Checkpoints
from redrb.runtime.world import rank_here, world_size_here
from redrb.stream.ranks.calls import MOST_STEPS

Acknowledge: TypeAlias = Literal["step", "checkpoint"]
"""When a trained batch is acknowledged: after its step, or after the checkpoint that holds it."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How a trainer takes batches and places them.

    Attributes:
        device: Device on which batches are trained.
        pin_memory: Whether batches are pinned for the copy to an accelerator.
        prefetch: Batches prepared while a step runs.
        timeout: Seconds to wait for a full batch; None waits for ever.
        rank: Rank among the trainers that share a task; None: the trainer shares no task.
        world_size: Number of these trainers; None with `rank` None.

    Raises:
        ConfigError: Only one of `rank` and `world_size` is given.
    """

    device: torch.device
    pin_memory: bool
    prefetch: int
    timeout: float | None
    rank: int | None
    world_size: int | None

    def __post_init__(self) -> None:
        if (self.rank is None) != (self.world_size is None):
            raise ConfigError("give rank and world_size, both or none.")

    def loader_options(self, first_step: int) -> dict[str, Any]:
        """Return options of an `ExperienceLoader` whose first batch is of `first_step`."""
        options: dict[str, Any] = {
            "prefetch": self.prefetch,
            "device": self.device,
            "pin_memory": self.pin_memory,
            "timeout": self.timeout,
        }
        if self.rank is not None:
            options |= {"rank": self.rank, "world_size": self.world_size, "first_step": first_step}
        return options


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """When a trainer writes checkpoints, and when it acknowledges batches.

    Attributes:
        ack: When a batch is acknowledged.
        directory: Directory of the checkpoints; None: none are written.
        every: Episodes between two checkpoints.

    Raises:
        ConfigError: `ack` is unknown or needs a directory, or `every` is below 1.
    """

    ack: Acknowledge
    directory: str | Path | None
    every: int

    def __post_init__(self) -> None:
        if self.ack not in ("step", "checkpoint") or (
            self.ack == "checkpoint" and self.directory is None
        ):
            raise ConfigError(
                f'ack={self.ack!r}: use "step", or "checkpoint" together with a checkpoint_dir.'
            )
        checked_int("checkpoint_every", self.every, 1)

    def open(self, owner: str, rank: int | None) -> Checkpoints | None:
        """Return the checkpoints of a trainer, of ranks each in a directory per rank.

        Args:
            owner: Name of the trainer and its task; checkpoints of other owners are refused.
            rank: The trainer's rank; None: its rank in torch.distributed.
        """
        if self.directory is None:
            return None
        if rank is None and world_size_here() == 1:
            return Checkpoints(Path(self.directory), owner=owner)
        # two are kept: ranks resume from the newest step of which all of them have a checkpoint
        rank = rank_here() if rank is None else rank
        return Checkpoints(Path(self.directory) / f"rank-{rank}", owner=owner, keep=2)

    def check_limits(self, update_steps: int, batches: BatchSettings) -> None:
        """Check that ranks may lease all batches between two checkpoints at once.

        Raises:
            ConfigError: The step protocol of ranks allows fewer.
        """
        if self.ack != "checkpoint" or batches.rank is None:
            return
        leased = update_steps * self.every + 1 + batches.prefetch
        if leased > MOST_STEPS:
            raise ConfigError(
                f"ranks lease at most {MOST_STEPS} steps at once, and update_steps={update_steps} "
                f"with checkpoint_every={self.every} leases {leased} until a "
                'checkpoint: checkpoint more often, use fewer update_steps, or use ack="step".'
            )
