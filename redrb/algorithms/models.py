"""How networks are called: any `nn.Module`, and the causal models of Hugging Face transformers.

A module is called as `module(sequences, attention_mask)`, int64 `[B, S]` each, and answers with a
tensor, or with a mapping or `ModelOutput` that holds it:

- actors with logits `[B, S, V]` (`logits`), at each position about the token after it;
- critics with values `[B, S]`, `[B, S, 1]` or one a sample, `[B]` (`value`, `values`, `logits`);
- reward models with one number a sample, `[B]` or `[B, 1]` (`reward`, `rewards`, `logits`).

What its `forward` names decides about more: `input_ids` (then all is passed by keyword),
`position_ids` (then they follow the mask, so that padding on the left changes nothing), `use_cache`
and `logits_to_keep` (then the prompt's logits are never computed). A `forward` that names `actions`
is passed A and answers for the last A tokens only: logits `[B, A, V]` that chose them, or values
`[B, A]` before them; it takes None for all positions. No part of transformers is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from redrb.algorithms.log_probs import choosing_logits
from redrb.errors import RecordError


def call(
    model: nn.Module, sequences: Tensor, attention_mask: Tensor | None, **options: object
) -> object:
    """Call a module on its own device and return what it answers.

    Args:
        model: Any module that follows this file's rules.
        sequences: Token ids, int64 `[B, S]`.
        attention_mask: 1 where a token counts, `[B, S]`; None: everywhere.
        options: Further keywords that its `forward` names.
    """
    names = forward_names(model)
    device = device_of(model) or sequences.device
    mask = torch.ones_like(sequences) if attention_mask is None else attention_mask
    tokens, mask = sequences.to(device), mask.to(device=device, dtype=torch.int64)
    if "position_ids" in names:
        options.setdefault("position_ids", positions(mask))
    if "use_cache" in names:
        options.setdefault("use_cache", False)
    if "input_ids" in names:
        return model(input_ids=tokens, attention_mask=mask, **options)
    return model(tokens, mask, **options)


def action_logits(
    model: nn.Module, sequences: Tensor, attention_mask: Tensor | None, actions: int
) -> Tensor:
    """Return the logits that chose each of the last A tokens, `[B, A, V]`, on the model's device.

    Raises:
        RecordError: The module answered with something else.
    """
    names = forward_names(model)
    options = {"actions": actions} if "actions" in names else {}
    if "logits_to_keep" in names:
        options["logits_to_keep"] = actions + 1
    answer = call(model, sequences, attention_mask, **options)
    logits = answered(answer, ("logits",), f"the actor {type(model).__name__}")
    return choosing_logits(logits, sequences.shape[1], actions)


def action_values(
    critic: nn.Module, sequences: Tensor, attention_mask: Tensor | None, actions: int
) -> Tensor:
    """Return the value of the state before each of the last A tokens, float32 `[B, A]`.

    A critic that values whole samples gives `[B]`. The values come back to `sequences`' device.

    Raises:
        RecordError: The module answered with something else.
    """
    options = {"actions": actions} if "actions" in forward_names(critic) else {}
    who = f"the critic {type(critic).__name__}"
    values = answered(
        call(critic, sequences, attention_mask, **options), ("value", "values", "logits"), who
    )
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
            f"{who} answered with shape {came}, not [{batch}, {length}], "
            f"[{batch}, {length}, 1] or [{batch}]: redrb.algorithms.ValueHead makes a critic of a "
            "causal model.",
            field="values",
        )
    return values.float().to(sequences.device)


def sequence_rewards(
    reward_model: nn.Module, sequences: Tensor, attention_mask: Tensor | None
) -> Tensor:
    """Return a reward model's number for each sample, float32 `[B]`, on `sequences`' device.

    Raises:
        RecordError: The module answered with something else.
    """
    who = f"the reward model {type(reward_model).__name__}"
    rewards = answered(
        call(reward_model, sequences, attention_mask), ("reward", "rewards", "logits"), who
    )
    batch = sequences.shape[0]
    if rewards.shape not in ((batch,), (batch, 1)):
        raise RecordError(
            f"{who} answered with shape {list(rewards.shape)}, not [{batch}]: one number a sample.",
            field="reward",
        )
    return rewards.reshape(batch).float().to(sequences.device)


def answered(answer: object, names: tuple[str, ...], who: str) -> Tensor:
    """Return the tensor of an answer: itself, or what it holds under the first of `names`.

    Raises:
        RecordError: It is no tensor and holds none under these names.
    """
    if isinstance(answer, Tensor):
        return answer
    for name in names:
        held = answer.get(name) if isinstance(answer, Mapping) else getattr(answer, name, None)
        if isinstance(held, Tensor):
            return held
    raise RecordError(
        f"{who} answered with a {type(answer).__name__}, not with a tensor or an output that has "
        f"{' or '.join(names)}."
    )


def positions(attention_mask: Tensor) -> Tensor:
    """Return each token's place among those that count, int64 `[B, S]`, 0 on padding before."""
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)


def device_of(model: nn.Module) -> torch.device | None:
    """Return the device of a module's first parameter, None where it has none."""
    return next((parameter.device for parameter in model.parameters()), None)


def forward_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the arguments that a module's `forward` takes.

    Behind wrappers that pass everything on (DistributedDataParallel, torch.compile, PEFT) it is the
    module inside that counts.
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
    """Return the module that a wrapper holds."""
    of_peft = getattr(model, "get_base_model", None)
    inner = of_peft() if callable(of_peft) else None
    for name in ("module", "_orig_mod"):
        inner = inner if inner is not None else getattr(model, name, None)
    return inner if isinstance(inner, nn.Module) else None


@contextmanager
def evaluating(*models: object) -> Iterator[None]:
    """Put modules into eval mode, and each of their parts back into its own afterwards.

    What is no module is passed over.
    """
    modules = [model for model in models if isinstance(model, nn.Module)]
    modes = [[(part, part.training) for part in module.modules()] for module in modules]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module, of_module in zip(modules, modes, strict=True):
            # through train() first: some modules do more than setting a flag, such as merging LoRA
            module.train(of_module[0][1])
            for part, mode in of_module:
                part.training = mode
