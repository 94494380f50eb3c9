"""TRL's importance ratios between the policy in training and the makers' policy."""

from __future__ import annotations

from typing import Any

from redrb.errors import ConfigError

_NEEDED = ("use_vllm", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode")


class NoEngine:
    """Takes the place of TRL's vLLM client: makers generate, so there is nothing to update."""

    def sync_weights(self) -> None:
        """Do nothing: TRL calls this before each generation."""


def correct_for_makers(trainer: Any) -> None:
    """Let a GRPOTrainer weigh its loss by the ratios of its policy to the makers' policy.

    TRL computes these ratios from the `logprobs` of a `rollout_func` only if `use_vllm` is set,
    and ignores the log-probabilities otherwise. With `use_vllm=True` in the GRPOConfig it would
    connect to vLLM, so this sets the attribute of the trainer instead. The options
    `vllm_importance_sampling_*` of the GRPOConfig hold; with
    `vllm_importance_sampling_correction=False` nothing is changed.

    Raises:
        ConfigError: The trainer has no such options: another version of TRL, or another trainer.
    """
    missing = [name for name in _NEEDED if not hasattr(trainer, name)]
    if missing:
        raise ConfigError(
            f"{type(trainer).__name__} has no {', '.join(missing)}: redrb.interop.trl is for the "
            "GRPOTrainer of TRL 1.16."
        )
    if trainer.use_vllm or not trainer.vllm_importance_sampling_correction:
        return
    trainer.use_vllm = True
    trainer.vllm_generation = NoEngine()
    trainer._last_loaded_step = -1  # noqa: SLF001 (TRL compares it before it calls sync_weights)
