"""The policy of a TRL trainer, published for the makers."""

from __future__ import annotations

from typing import Any

from accelerate import DistributedType

from redrb.errors import ConfigError
from redrb.weights import WeightPublisher

_SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)
"""Their weights are gathered by a collective operation of all ranks."""


class Publishing:
    """Publishes a trainer's policy: full weights, or only the adapter of a PEFT model.

    Args:
        publisher: None on ranks that do not publish.
        every: Fewest optimizer steps between two versions.

    Raises:
        ConfigError: `publisher` is something else.
    """

    def __init__(self, publisher: WeightPublisher | None, every: int) -> None:
        if not isinstance(publisher, WeightPublisher | None):
            raise ConfigError(f"publisher={publisher!r:.80}: give a redrb.WeightPublisher or None.")
        self._publisher = publisher
        self.every = every
        self._published_at = 0

    def after_step(self, trainer: Any, step: int) -> None:
        """Publish if a version is due after optimizer step `step`."""
        if step - self._published_at >= self.every:
            self._published_at = step
            self.publish(trainer)

    def publish(self, trainer: Any) -> None:
        """Publish the policy now; all ranks call it, as sharded weights are gathered."""
        accelerator = trainer.accelerator
        if self._publisher is None:
            if accelerator.distributed_type in _SHARDED:
                accelerator.get_state_dict(trainer.model)
            return
        model = accelerator.unwrap_model(trainer.model)
        if hasattr(model, "peft_config"):
            if accelerator.distributed_type in _SHARDED:
                raise ConfigError(
                    "an adapter that is sharded over ranks cannot be published: train it with DDP, "
                    "or without PEFT."
                )
            self._publisher.publish_lora(model)
        else:
            self._publisher.publish(accelerator.get_state_dict(trainer.model))
