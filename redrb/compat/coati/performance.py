"""What loops show of themselves: samples a second and TFLOPS.

Floating-point operations are counted as in `coati.ray.callbacks.performance_evaluator`: N
parameters cost 2 * N a token in a forward pass, twice that in a backward pass.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from typing import Any

from torch import nn

from redrb.experience import Experience
from redrb.train.callbacks import MakerCallback, TrainerCallback
from redrb.train.world import mean_over_ranks, rank_here, world_size_here

_log = logging.getLogger("redrb")


def parameters_of(model: object) -> int:
    """Return the number of a model's parameters, 0 if it is no module."""
    return sum(p.numel() for p in model.parameters()) if isinstance(model, nn.Module) else 0


class _Measured:
    """Seconds by clock, samples and operations of a loop."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._since: dict[str, float] = {}
        self._samples = 0
        self._flops = 0.0
        self._counts = True

    def _start(self, clock: str) -> None:
        if self._counts:
            self._since[clock] = time.perf_counter()

    def _stop(self, clock: str) -> None:
        now = time.perf_counter()
        self._seconds[clock] += now - self._since.pop(clock, now)

    def _conclude(self, role: str, *clocks: str, shares: bool) -> None:
        """Average over the ranks and log: the first clock computes, of all of "overall"."""
        names = ("overall", *clocks)
        seconds = [self._seconds[name] for name in names]
        flops = self._flops / 1e12 / seconds[1] if seconds[1] else 0.0
        *means, tflops = mean_over_ranks([*seconds, flops])
        samples, overall = self._samples * world_size_here(), means[0]
        if not samples or not overall:
            return
        each = dict(zip(names, means, strict=True))
        self.figures = {"samples_per_second": samples / overall, "tflops": tflops}
        self.figures |= {f"{name}_s_per_sample": spent / samples for name, spent in each.items()}
        if shares:
            self.figures |= {f"{name}_share": each[name] / overall for name in clocks}
        if rank_here() == 0:
            listed = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
            _log.info("performance of the %s: %s", role, listed)


class TrainerPerformanceEvaluator(_Measured, TrainerCallback):
    """Measures a trainer; after `fit` the result is in `figures`, and rank 0 logs it.

    Attributes:
        figures: `samples_per_second`, `tflops`, `overall_s_per_sample`, `train_s_per_sample`,
            `update_s_per_sample`, averaged over the ranks; empty until `fit` has ended.
    """

    def __init__(
        self,
        actor_num_params: int = 0,
        critic_num_params: int = 0,
        enable_grad_checkpoint: bool = False,  # noqa: FBT001 (coati has it by position)
        ignore_first_episodes: int = 1,
    ) -> None:
        """Count parameters.

        Args:
            actor_num_params: Parameters of the actor; 0 leaves its operations out.
            enable_grad_checkpoint: Gradient checkpointing costs one more forward pass.
            ignore_first_episodes: Number of first episodes that are not measured, as warm-up.
        """
        super().__init__()
        self._parameters = actor_num_params + critic_num_params
        self._passes = 3 + int(enable_grad_checkpoint)
        self._ignored = ignore_first_episodes

    def on_episode_start(self, episode: int) -> None:
        """Start the episode's clock, unless the episode is ignored."""
        self._counts = episode >= self._ignored
        self._start("overall")

    def on_episode_end(self, episode: int) -> None:  # noqa: ARG002
        """Stop the episode's clock."""
        self._stop("overall")

    def on_batch_start(self) -> None:
        """Start the step's clock."""
        self._start("train")

    def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:  # noqa: ARG002
        """Stop the step's clock; a model costs `2 * N * B * S * (3 + checkpointing)`."""
        if not self._counts or experience.sequences is None:
            return
        self._stop("train")
        batch, length = experience.sequences.shape
        self._samples += batch
        self._flops += 2 * self._parameters * batch * length * self._passes

    def on_update_start(self) -> None:
        """Start the update's clock."""
        self._start("update")

    def on_update_end(self) -> None:
        """Stop the update's clock."""
        self._stop("update")

    def on_fit_end(self) -> None:
        """Average over the ranks and log."""
        self._conclude("trainer", "train", "update", shares=False)


class ExperienceMakerPerformanceEvaluator(_Measured, MakerCallback):
    """Measures a maker; after `workingloop` the result is in `figures`, and rank 0 logs it.

    Attributes:
        figures: `samples_per_second`, `tflops`, `overall_s_per_sample`, `make_s_per_sample`,
            `send_s_per_sample`, `make_share`, `send_share`, averaged over the ranks; empty until
            `workingloop` has ended.
    """

    def __init__(
        self,
        actor_num_params: int,
        critic_num_params: int,
        initial_model_num_params: int,
        reward_model_num_params: int,
    ) -> None:
        """Count the parameters of each model; 0 if there is no such model."""
        super().__init__()
        self._actor = actor_num_params
        scoring = critic_num_params + initial_model_num_params + reward_model_num_params
        self._forwards = actor_num_params + scoring

    def on_batch_start(self) -> None:
        """Start the clock of a batch of prompts."""
        self._start("overall")

    def on_batch_end(self) -> None:
        """Stop the clock of a batch of prompts."""
        self._stop("overall")

    def on_make_experience_start(self) -> None:
        """Start the clock of generation and scoring."""
        self._start("make")

    def on_make_experience_end(self, experience: Experience) -> None:
        """Stop the clock of generation and scoring, and count operations.

        Generation costs `2 * N_actor * B * (input_len + seq_len - 1) * num_actions / 2` operations,
        each model's forward pass `2 * N * B * seq_len`.
        """
        self._stop("make")
        if experience.sequences is None:
            return
        batch, length = experience.sequences.shape
        marks = (experience.action_mask, experience.action_log_probs)
        actions = next((each.shape[1] for each in marks if each is not None), 0)
        tokens = (length - actions + length - 1) * actions / 2
        self._samples += batch
        self._flops += 2 * self._actor * batch * tokens + 2 * self._forwards * batch * length

    def on_send_start(self) -> None:
        """Start the clock of sending."""
        self._start("send")

    def on_send_end(self) -> None:
        """Stop the clock of sending, as far as it holds up the loop."""
        self._stop("send")

    def on_loop_end(self) -> None:
        """Average over the ranks and log."""
        self._conclude("maker", "make", "send", shares=True)
