"""Performance of trainers and makers: samples a second and TFLOPS, by ColossalAI's formulas.

Floating-point operations are counted as in `coati.ray.callbacks.performance_evaluator`: N
parameters cost 2 * N a token in a forward pass, twice that in a backward pass.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from redrb.experience import Experience
from redrb.runtime.callbacks import MakerCallback, TrainerCallback
from redrb.runtime.world import mean_over_ranks, rank_here, world_size_here

_log = logging.getLogger("redrb")


class Stopwatch:
    """Adds up seconds between `start` and `stop`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Add the seconds since `start`; does nothing without a `start`."""
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None


class TrainerPerformanceEvaluator(TrainerCallback):
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
            critic_num_params: Parameters of the critic.
            enable_grad_checkpoint: Gradient checkpointing costs one more forward pass.
            ignore_first_episodes: Number of first episodes that are not measured, as warm-up.
        """
        self._parameters = actor_num_params + critic_num_params
        self._passes = 3 + int(enable_grad_checkpoint)
        self._ignored = ignore_first_episodes
        self._counts = False
        self._overall, self._train, self._update = Stopwatch(), Stopwatch(), Stopwatch()
        self._samples = 0
        self._flops = 0
        self.figures: dict[str, float] = {}

    def on_episode_start(self, episode: int) -> None:
        """Start the episode's clock, unless the episode is ignored."""
        self._counts = episode >= self._ignored
        if self._counts:
            self._overall.start()

    def on_episode_end(self, episode: int) -> None:  # noqa: ARG002
        """Stop the episode's clock."""
        self._overall.stop()

    def on_batch_start(self) -> None:
        """Start the step's clock."""
        if self._counts:
            self._train.start()

    def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:  # noqa: ARG002
        """Stop the step's clock; a model costs `2 * N * B * S * (3 + checkpointing)`."""
        if not self._counts or experience.sequences is None:
            return
        self._train.stop()
        batch, length = experience.sequences.shape
        self._samples += batch
        self._flops += 2 * self._parameters * batch * length * self._passes

    def on_update_start(self) -> None:
        """Start the update's clock."""
        if self._counts:
            self._update.start()

    def on_update_end(self) -> None:
        """Stop the update's clock."""
        self._update.stop()

    def on_fit_end(self) -> None:
        """Average over the ranks and log."""
        seconds = [self._overall.seconds, self._train.seconds, self._update.seconds]
        flops = self._flops / 1e12 / self._train.seconds if self._train.seconds else 0.0
        overall, train, update, tflops = mean_over_ranks([*seconds, flops])
        samples = self._samples * world_size_here()
        if not samples:
            return
        self.figures = {
            "samples_per_second": samples / overall if overall else 0.0,
            "tflops": tflops,
            "overall_s_per_sample": overall / samples,
            "train_s_per_sample": train / samples,
            "update_s_per_sample": update / samples,
        }
        _log_figures("trainer", self.figures)


class ExperienceMakerPerformanceEvaluator(MakerCallback):
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
        self._actor = actor_num_params
        self._forwards = (
            actor_num_params
            + critic_num_params
            + initial_model_num_params
            + reward_model_num_params
        )
        self._overall, self._make, self._send = Stopwatch(), Stopwatch(), Stopwatch()
        self._samples = 0
        self._flops = 0.0
        self.figures: dict[str, float] = {}

    def on_batch_start(self) -> None:
        """Start the clock of a batch of prompts."""
        self._overall.start()

    def on_batch_end(self) -> None:
        """Stop the clock of a batch of prompts."""
        self._overall.stop()

    def on_make_experience_start(self) -> None:
        """Start the clock of generation and scoring."""
        self._make.start()

    def on_make_experience_end(self, experience: Experience) -> None:
        """Stop the clock of generation and scoring, and count operations.

        Generation costs `2 * N_actor * B * (input_len + seq_len - 1) * num_actions / 2` operations,
        each model's forward pass `2 * N * B * seq_len`.
        """
        self._make.stop()
        if experience.sequences is None:
            return
        batch, length = experience.sequences.shape
        actions = _actions(experience)
        tokens = (length - actions + length - 1) * actions / 2
        self._samples += batch
        self._flops += 2 * self._actor * batch * tokens + 2 * self._forwards * batch * length

    def on_send_start(self) -> None:
        """Start the clock of sending."""
        self._send.start()

    def on_send_end(self) -> None:
        """Stop the clock of sending, as far as it holds up the loop."""
        self._send.stop()

    def on_loop_end(self) -> None:
        """Average over the ranks and log."""
        seconds = [self._overall.seconds, self._make.seconds, self._send.seconds]
        flops = self._flops / 1e12 / self._make.seconds if self._make.seconds else 0.0
        overall, make, send, tflops = mean_over_ranks([*seconds, flops])
        samples = self._samples * world_size_here()
        if not samples or not overall:
            return
        self.figures = {
            "samples_per_second": samples / overall,
            "tflops": tflops,
            "overall_s_per_sample": overall / samples,
            "make_s_per_sample": make / samples,
            "send_s_per_sample": send / samples,
            "make_share": make / overall,
            "send_share": send / overall,
        }
        _log_figures("maker", self.figures)


def _actions(experience: Experience) -> int:
    for field in (experience.action_mask, experience.action_log_probs):
        if field is not None:
            return int(field.shape[1])
    return 0


def _log_figures(role: str, figures: dict[str, float]) -> None:
    if rank_here() == 0:
        listed = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        _log.info("performance of the %s: %s", role, listed)
