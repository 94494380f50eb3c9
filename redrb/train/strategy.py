"""Placement of models: on one device, or by Accelerate with mixed precision, DDP and FSDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import torch
from torch import nn

from redrb import environment
from redrb.checks import check_choice, require_package
from redrb.errors import ConfigError
from redrb.train.world import (
    default_device,
    has_process_group,
    rank_here,
    set_environment,
    world_size_here,
)

Model = TypeVar("Model")


class Strategy:
    """Places models on one device. Base of other strategies; `strategy_fn` returns one.

    Source: the part of `coati.trainer.strategies` that makers and trainers need.
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        """Use a device; default: the accelerator if there is one, with CUDA that of LOCAL_RANK.

        Raises:
            ConfigError: There is no such device.
        """
        self.device = _local_device() if device is None else _checked_device(device)

    @contextmanager
    def model_init_context(self) -> Iterator[None]:
        """Context in which models are made, such as for lazy or sharded initialisation."""
        yield

    def prepare(self, model: Model) -> Model:
        """Return a model ready for use; anything but a module is returned unchanged."""
        return model.to(self.device) if isinstance(model, nn.Module) else model


def _checked_device(device: str | torch.device) -> torch.device:
    """Return a device that torch can use; "cuda" is that of LOCAL_RANK, if it is set."""
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r:.80} is none: use cpu, cuda or cuda:0.") from error
    if chosen.type != "cuda":
        return chosen
    count = torch.cuda.device_count()
    if (chosen.index or 0) >= count:
        build = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "has no CUDA"
        raise ConfigError(
            f"device={device!s}: torch {torch.__version__}, which {build}, finds {count} GPUs. "
            "Install a torch with CUDA, give the process or container a GPU, or use another device."
        )
    return chosen if chosen.index is not None else _local_device()


def _local_device() -> torch.device:
    """Return the accelerator; of several GPUs the one that LOCAL_RANK names, if it is set."""
    device, rank = default_device(), environment.variable("LOCAL_RANK", "")
    if device.type == "cuda" and rank and rank.isdigit() and int(rank) < torch.cuda.device_count():
        return torch.device("cuda", int(rank))
    return device


MixedPrecision: TypeAlias = Literal["no", "bf16"]


class AccelerateStrategy(Strategy):
    """Places models in training by Accelerate, on one process or on the ranks of a process group.

    Several ranks replicate each model by DistributedDataParallel, or shard it by FSDP2; all ranks
    take steps with the gradient of all their batches. Frozen models are only moved to the device.
    Build optimizers after `prepare`, of the parameters of the returned model.

    Args:
        device: As for `Strategy`.
        mixed_precision: "bf16" computes in bfloat16, with weights and optimizers as they are.
        gradient_checkpointing: Compute activations again in the backward pass, for models of
            transformers. It acts in training mode only, so `prepare` puts the model into it.
        shard: Shard parameters, gradients and optimizers over the ranks (FSDP2) instead of
            replicating them: by layer where the model names its layers (`_no_split_modules` of
            transformers), otherwise as a whole.

    Raises:
        ConfigError: `mixed_precision` is another one.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        *,
        mixed_precision: MixedPrecision = "no",
        gradient_checkpointing: bool = False,
        shard: bool = False,
    ) -> None:
        super().__init__(device)
        check_choice("mixed_precision", mixed_precision, get_args(MixedPrecision))
        self._mixed_precision = mixed_precision
        self._checkpointing = gradient_checkpointing
        self._shard = shard

    def prepare(self, model: Model) -> Model:
        """Return a model ready for use; only a module with trainable parameters is wrapped.

        Raises:
            ConfigError: Accelerate is not installed; WORLD_SIZE is above 1, and there is no process
                group; the model cannot checkpoint gradients; or it is to be sharded, and shares
                parameters with a sharded model.
        """
        placed = super().prepare(model)
        if not isinstance(placed, nn.Module):
            return placed
        if not any(p.requires_grad for p in placed.parameters()):
            return placed
        size = environment.variable("WORLD_SIZE", "1") or "1"
        if not has_process_group() and size.isdigit() and int(size) > 1:
            raise ConfigError(
                f"WORLD_SIZE is {size}, and there is no process group: call "
                "torch.distributed.init_process_group() before the models are made, or use "
                "redrb.train.Strategy. Gradients would not be averaged over the ranks."
            )
        if self._checkpointing:
            _checkpoint_gradients(placed)
        if world_size_here() == 1 and self._mixed_precision == "no":
            return placed
        if self._shard and world_size_here() > 1:
            return self._sharded(placed)  # type: ignore[return-value]
        return self._accelerator.prepare_model(placed, device_placement=False)  # type: ignore[no-any-return]

    def _sharded(self, model: nn.Module) -> nn.Module:
        accelerate = _accelerate()
        if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
            raise ConfigError(
                f"{type(model).__name__} cannot be sharded, because it shares parameters with a "
                "model that is sharded already: give each model its own by copy.deepcopy, or leave "
                "shard out."
            )
        layers = _layers(model)
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2,
            cpu_ram_efficient_loading=False,
            auto_wrap_policy="transformer_based_wrap" if layers else "no_wrap",
            transformer_cls_names_to_wrap=sorted(layers) or None,
        )
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)
        # Accelerate chooses FSDP by itself on accelerators only, and once for all models
        state = self._accelerator.state
        state.distributed_type, state.fsdp_plugin = accelerate.DistributedType.FSDP, plugin
        # it wants an optimizer, whose parameters it replaces; the trainer builds its own later
        unused = torch.optim.SGD(model.parameters(), lr=0.0)
        sharded: nn.Module = self._accelerator.prepare(model, unused)[0]
        return sharded

    @cached_property
    def _accelerator(self) -> Any:
        if has_process_group():
            rank, size = str(rank_here()), str(world_size_here())
            of_ranks = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": size,
                "LOCAL_WORLD_SIZE": size,
                "OMP_NUM_THREADS": str(torch.get_num_threads()),  # Accelerate would change it
            }
            for name, value in of_ranks.items():
                if environment.variable(name) is None:
                    environment.set_variable(name, value)
        accelerate = _accelerate()
        try:
            return accelerate.Accelerator(
                cpu=self.device.type == "cpu",
                mixed_precision=self._mixed_precision,
                device_placement=False,
            )
        except ValueError as error:
            raise ConfigError(f"Accelerate cannot be used so: {error}") from error


def _accelerate() -> Any:
    require_package("accelerate", extra="accelerate")
    import accelerate

    return accelerate


def _layers(model: nn.Module) -> set[str]:
    """Return the class names of a transformers model's layers, of those that are in the model."""
    named: set[str] = set()
    for part in model.modules():
        names = getattr(part, "_no_split_modules", None)
        named.update(names if isinstance(names, list | tuple | set) else ())
    return named & {type(part).__name__ for part in model.modules()}


_ENABLING = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
"""Methods of transformers' models that turn it on: the second in earlier versions."""


def _checkpoint_gradients(model: nn.Module) -> None:
    methods = [getattr(part, name, None) for part in model.modules() for name in _ENABLING]
    enable = next(filter(callable, methods), None)
    if enable is None:
        raise ConfigError(
            f"gradient_checkpointing: {type(model).__name__} has no method "
            f"{' or '.join(_ENABLING)}, as models of transformers have: leave it out, or use "
            "torch.utils.checkpoint in the model."
        )
    try:
        enable({"use_reentrant": False})
    except ValueError as error:  # not every model of transformers can
        raise ConfigError(
            f"gradient_checkpointing: {error} Leave it out, or use torch.utils.checkpoint in the "
            "model."
        ) from error
    model.train()


def place_models(
    strategy_fn: Callable[[], Strategy | None],
    model_fn: Callable[[], Any],
    env_info: Mapping[str, Any] | None,
    *,
    device: str | torch.device | None = None,
) -> tuple[tuple[Any, ...], Strategy]:
    """Make models and place them; returns them in their order, and the strategy.

    Args:
        strategy_fn: Returns the strategy; None: `Strategy(device)`.
        model_fn: Returns a module, or several models; a model may be None or a function.
        device: Device of the default strategy.

    Raises:
        ConfigError: `env_info` has an unknown name, or a model cannot be placed.
    """
    set_environment(env_info)
    strategy = strategy_fn() or Strategy(device)
    with strategy.model_init_context():
        made = model_fn()
    models = (made,) if isinstance(made, nn.Module) else tuple(made)
    return tuple(map(strategy.prepare, models)), strategy
