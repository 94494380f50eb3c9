"""How networks are called: any `nn.Module`, and the causal models of Hugging Face transformers.

A module is called as `module(sequences, attention_mask)`, int64 `[B, S]` each, and returns a
tensor, or a mapping or `ModelOutput` that holds the tensor under one of the names in brackets:

- actors return logits `[B, S, V]` (`logits`); each position predicts the next token;
- critics return values `[B, S]`, `[B, S, 1]`, or `[B]`, one a sample (`value`, `values`, `logits`);
- reward models return one number a sample, `[B]` or `[B, 1]` (`reward`, `rewards`, `logits`).

The argument names of its `forward` switch on more: with `input_ids`, all is passed by keyword; with
`position_ids`, positions follow the mask, so that padding on the left changes nothing; with
`use_cache` and `logits_to_keep`, the prompt's logits are never computed. A `forward` with `actions`
gets A and returns only the last A tokens: the logits `[B, A, V]` that chose them, or the values
`[B, A]` before them; None means all positions. Tensors of `Experience.tensors` that `forward` names
are passed too (`redrb.algorithms.model_inputs`); a `forward` with `inputs` gets all of them. No
part of transformers is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from redrb.algorithms.log_probs import choosing_logits
from redrb.algorithms.model_inputs import GRIDS, NO_INPUTS, ModelInputs
from redrb.errors import RecordError


def call(
    model: nn.Module,
    sequences: Tensor,
    attention_mask: Tensor | None,
    *,
    inputs: ModelInputs = NO_INPUTS,
    **options: Any,
) -> object:
    """Call a module on its device and return its output.

    Args:
        model: Any module that follows this file's rules.
        sequences: Token ids, int64 `[B, S]`.
        attention_mask: 1 where a token counts, `[B, S]`; None: all tokens count.
        inputs: Extra tensors, of which the module gets those that its `forward` names.
        options: Further keyword arguments of its `forward`.
    """
    names = forward_names(model)
    device = device_of(model) or sequences.device
    mask = torch.ones_like(sequences) if attention_mask is None else attention_mask
    tokens, mask = sequences.to(device), mask.to(device=device, dtype=torch.int64)
    given = inputs.for_forward(names, device)
    options = {**given, **options}
    if "inputs" in names:
        options["inputs"] = inputs
    if "position_ids" in names and not GRIDS & given.keys():
        options.setdefault("position_ids", positions(mask))
    if "use_cache" in names:
        options.setdefault("use_cache", False)
    if "input_ids" in names:
        return model(input_ids=tokens, attention_mask=mask, **options)
    return model(tokens, mask, **options)


def action_logits(
    model: nn.Module,
    sequences: Tensor,
    attention_mask: Tensor | None,
    actions: int,
    *,
    inputs: ModelInputs = NO_INPUTS,
) -> Tensor:
    """Return the logits that chose each of the last A tokens, `[B, A, V]`, on the model's device.

    Raises:
        RecordError: The module returned something else.
    """
    names = forward_names(model)
    options = {"actions": actions} if "actions" in names else {}
    if "logits_to_keep" in names:
        options["logits_to_keep"] = actions + 1
    output = call(model, sequences, attention_mask, inputs=inputs, **options)
    logits = output_tensor(output, ("logits",), f"the actor {type(model).__name__}")
    return choosing_logits(logits, sequences.shape[1], actions)


def action_values(
    critic: nn.Module,
    sequences: Tensor,
    attention_mask: Tensor | None,
    actions: int,
    *,
    inputs: ModelInputs = NO_INPUTS,
) -> Tensor:
    """Return the value of the state before each of the last A tokens, float32 `[B, A]`.

    A critic with one value a sample gives `[B]`. The values are on the device of `sequences`.

    Raises:
        RecordError: The module returned something else.
    """
    options = {"actions": actions} if "actions" in forward_names(critic) else {}
    role = f"the critic {type(critic).__name__}"
    output = call(critic, sequences, attention_mask, inputs=inputs, **options)
    values = output_tensor(output, ("value", "values", "logits"), role)
    batch, length = sequences.shape
    came = list(values.shape)
    if values.dim() == 3 and values.shape[2] == 1:
        values = values.squeeze(2)
    if values.dim() == 2 and values.shape[1] == length:
        values = values[:, -actions - 1 : -1]
    elif values.dim() == 2 and values.shape[1] == 1 != actions:
        values = values.squeeze(1)
    if values.shape not in ((batch, actions), (batch,)):
        raise RecordError(
            f"{role} answered with shape {came}, not [{batch}, {length}], "
            f"[{batch}, {length}, 1] or [{batch}]: redrb.algorithms.ValueHead makes a critic of a "
            "causal model.",
            field="values",
        )
    wide = torch.promote_types(values.dtype, torch.float32)
    return values.to(device=sequences.device, dtype=wide)


def sequence_rewards(
    reward_model: nn.Module,
    sequences: Tensor,
    attention_mask: Tensor | None,
    *,
    inputs: ModelInputs = NO_INPUTS,
) -> Tensor:
    """Return a reward model's score of each sample, float32 `[B]`, on the device of `sequences`.

    Raises:
        RecordError: The module returned something else.
    """
    role = f"the reward model {type(reward_model).__name__}"
    output = call(reward_model, sequences, attention_mask, inputs=inputs)
    rewards = output_tensor(output, ("reward", "rewards", "logits"), role)
    batch = sequences.shape[0]
    if rewards.shape not in ((batch,), (batch, 1)):
        raise RecordError(
            f"{role} answered with shape {list(rewards.shape)}, not [{batch}]: one number "
            "a sample.",
            field="reward",
        )
    return rewards.reshape(batch).float().to(sequences.device)


def output_tensor(output: object, names: tuple[str, ...], role: str) -> Tensor:
    """Return the tensor of a module's output.

    Args:
        output: A tensor, or a mapping or object that holds one.
        names: Names under which to look for the tensor; the first hit counts.
        role: Role and class of the module, for error messages.

    Raises:
        RecordError: The output is no tensor and holds none under these names.
    """
    if isinstance(output, Tensor):
        return output
    for name in names:
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    raise RecordError(
        f"{role} answered with a {type(output).__name__}, not with a tensor or an output that has "
        f"{' or '.join(names)}."
    )


def positions(attention_mask: Tensor) -> Tensor:
    """Return each token's index among the tokens that count, int64 `[B, S]`; 0 on left padding."""
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)


def device_of(model: nn.Module) -> torch.device | None:
    """Return the device of a module's first parameter; None without parameters."""
    return next((parameter.device for parameter in model.parameters()), None)


def forward_names(model: nn.Module) -> frozenset[str]:
    """Return the argument names of a module's `forward`.

    For wrappers that pass everything on (DistributedDataParallel, torch.compile, PEFT), the names
    of the module inside are added.
    """
    arguments = inspect.signature(model.forward).parameters
    names = frozenset(
        name for name, argument in arguments.items() if argument.kind not in _COLLECTING
    )
    if any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in arguments.values()):
        inner = _wrapped(model)
        if inner is not None and inner is not model:
            return names | forward_names(inner)
    return names


_COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _wrapped(model: nn.Module) -> nn.Module | None:
    """Return the module inside a wrapper."""
    of_peft = getattr(model, "get_base_model", None)
    inner = of_peft() if callable(of_peft) else None
    for name in ("module", "_orig_mod"):
        inner = inner if inner is not None else getattr(model, name, None)
    return inner if isinstance(inner, nn.Module) else None


@contextmanager
def evaluating(*models: object) -> Iterator[None]:
    """Put modules into eval mode in this block; afterwards each part has its old mode again.

    Arguments that are no modules are ignored.
    """
    modules = [model for model in models if isinstance(model, nn.Module)]
    modes = [[(part, part.training) for part in module.modules()] for module in modules]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module, part_modes in zip(modules, modes, strict=True):
            # call train() first: in some modules it does more than set a flag, such as unmerge LoRA
            module.train(part_modes[0][1])
            for part, mode in part_modes:
                part.training = mode
