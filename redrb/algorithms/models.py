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
are passed too (`ModelInputs`); a `forward` with `inputs` gets all of them. No part of transformers
is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from redrb.algorithms.log_probs import choosing_logits
from redrb.errors import ConfigError, RecordError
from redrb.experience.batching import lengths_of, token_aligned
from redrb.experience.padding import lengths_name, row_slice

NO_INPUT = frozenset(("input_ids", "sequences", "attention_mask", "labels"))
"""Arguments of `forward` that are never taken from `Experience.tensors`."""


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """Tensors of B samples that networks take beside token ids, such as images.

    An input is a tensor of `Experience.tensors` that the model's `forward` names, such as
    `pixel_values` or `image_grid_thw`. A sample holds what a processor of Hugging Face returns for
    this sample alone. In a batch, inputs are joined along their first dimension, as processors do,
    so models get `pixel_values` `[patches of all samples, D]`; a model that wants `[B, ...]` gets
    it from samples with `[1, ...]`. Where no sample of a batch has an entry, as with prompts
    without an image, the argument is left out. There are two exceptions: numbers `[]` are stacked
    to `[B]`, and a tensor `[S]` that has the length of the sequence in each sample of a batch, such
    as `mm_token_type_ids`, stays aligned with it, `[B, S]`.

    Attributes:
        aligned: Tensors of one entry a token, `[B, S]`, by name.
        others: All other tensors, `[B, ...]`, padded on the left to the longest sample.
        lengths: First dimension of each sample's tensor, int64 `[B]`, where they differ, or are
            other than those of sequences that are padded to the same shape.
    """

    aligned: Mapping[str, Tensor] = field(default_factory=dict)
    others: Mapping[str, Tensor] = field(default_factory=dict)
    lengths: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], sequences: Tensor) -> Self:
        """Sort the tensors of a batch, `[B, ...]` each, whose `sequences` are `[B, S]`.

        A tensor of the shape of `sequences` is aligned with it, unless it has `<name>_lengths`.
        """
        lengths = {name: tensors[lengths_name(name)] for name in lengths_of(tensors)}
        given = {
            name: tensor
            for name, tensor in tensors.items()
            if name not in NO_INPUT and name not in map(lengths_name, lengths)
        }
        aligned = {name: given[name] for name in token_aligned(tensors, sequences) if name in given}
        others = {name: each for name, each in given.items() if name not in aligned}
        return cls(aligned, others, {name: lengths[name] for name in lengths if name in others})

    def rows(self, index: Tensor) -> ModelInputs:
        """Return the inputs of some rows, int64 `[N]`, in any order, also repeated."""
        sorts = (self.aligned, self.others, self.lengths)
        chosen = (
            {name: each[index.to(each.device)] for name, each in tensors.items()}
            for tensors in sorts
        )
        return ModelInputs(*chosen)

    def columns(self, first: int, last: int) -> ModelInputs:
        """Return the inputs for the tokens at positions `first` to `last` - 1 of all rows."""
        aligned = {name: each[:, first:last] for name, each in self.aligned.items()}
        return replace(self, aligned=aligned)

    def extended(self, by: int) -> ModelInputs:
        """Return the inputs for sequences with `by` further tokens, whose aligned entries are 0."""
        aligned = {
            name: torch.cat([each, each.new_zeros(each.shape[0], by)], 1)
            for name, each in self.aligned.items()
        }
        return replace(self, aligned=aligned)

    def reordered(self, order: Tensor) -> ModelInputs:
        """Return the inputs for rows whose tokens were reordered by `gather(1, order)`."""
        aligned = {
            name: each.gather(1, order.to(each.device)) for name, each in self.aligned.items()
        }
        return replace(self, aligned=aligned)

    def for_forward(self, names: frozenset[str], device: torch.device) -> dict[str, Tensor]:
        """Return the inputs that a `forward` with these argument names takes, on a device."""
        found = {name: each for name, each in self.aligned.items() if name in names}
        joined = {name: self._joined(name) for name in self.others if name in names}
        found |= {name: each for name, each in joined.items() if len(each)}
        return {name: each.to(device) for name, each in found.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, as `Experience.tensors` holds them."""
        of_lengths = {lengths_name(name): each for name, each in self.lengths.items()}
        return {**self.aligned, **self.others, **of_lengths}

    def _joined(self, name: str) -> Tensor:
        tensor = self.others[name]
        if tensor.dim() == 1:
            return tensor
        if name not in self.lengths:
            return tensor.flatten(0, 1)
        longest = tensor.shape[1]
        lengths = self.lengths[name].tolist()
        return torch.cat(
            [
                row[row_slice(length, longest, "left")]
                for row, length in zip(tensor, lengths, strict=True)
            ]
        )


NO_INPUTS = ModelInputs()

GRIDS = frozenset(("image_grid_thw", "video_grid_thw"))
"""Inputs from which models make the positions of tokens, so that no `position_ids` are passed."""


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
        sequences: Token ids, int64 `[B, S]`.
        attention_mask: 1 where a token counts, `[B, S]`; None: all tokens count.
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
    """Return the tensor of a module's output; raises RecordError if none has one of these names."""
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


class ValueHead(nn.Module):
    """A trunk with a linear head that gives a value at every position, float32 `[B, S]`.

    The value at a position is that of the state after its token, so the value before an action is
    one position earlier, like the logits that chose the action. The head starts at 0.

    Args:
        trunk: A module that returns hidden states `[B, S, H]`, or a Hugging Face model; of a causal
            model only the trunk is used, without the vocabulary head. It is not copied: pass
            `copy.deepcopy(actor)` unless actor and critic shall share it.
        hidden_size: Width H of the hidden states; None: `trunk.config.hidden_size`.

    Raises:
        ConfigError: The width of the hidden states is not known.
    """

    def __init__(self, trunk: nn.Module, *, hidden_size: int | None = None) -> None:
        super().__init__()
        if hidden_size is None:
            hidden_size = getattr(getattr(trunk, "config", None), "hidden_size", None)
        if not isinstance(hidden_size, int) or hidden_size < 1:
            raise ConfigError(
                f"hidden_size {hidden_size!r} of the trunk {type(trunk).__name__}: give "
                "ValueHead(trunk, hidden_size=...) the width of its hidden states."
            )
        headless = getattr(trunk, "base_model", trunk)
        self.trunk: nn.Module = headless if hasattr(trunk, "base_model_prefix") else trunk
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        first = next(self.trunk.parameters(), None)
        if first is not None:
            self.head.to(first.device)

    def forward(
        self,
        sequences: Tensor,
        attention_mask: Tensor | None = None,
        inputs: ModelInputs = NO_INPUTS,
    ) -> Tensor:
        """Return the value of every position, float32 `[B, S]`.

        Args:
            sequences: Token ids, int64 `[B, S]`.
            attention_mask: 1 where a token counts, `[B, S]`; None: all tokens count.
            inputs: Extra tensors, such as `pixel_values`, for the trunk.

        Raises:
            RecordError: The trunk's hidden states have another shape.
        """
        role = f"the trunk {type(self.trunk).__name__}"
        hidden = output_tensor(
            call(self.trunk, sequences, attention_mask, inputs=inputs), ("last_hidden_state",), role
        )
        width = self.head.in_features
        if hidden.dim() != 3 or hidden.shape[2] != width:
            raise RecordError(
                f"{role} answered with shape {list(hidden.shape)}, not "
                f"[{', '.join(map(str, sequences.shape))}, {width}]."
            )
        values: Tensor = self.head(hidden.to(self.head.weight.dtype))
        return values.squeeze(2).float()
