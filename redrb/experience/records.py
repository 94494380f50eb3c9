"""The records of experience: one sample (`BufferItem`) and a padded batch (`Experience`).

The eight standard fields and their order are those of ColossalAI's ColossalChat (`coati`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from redrb.errors import RecordError
from redrb.experience.fields import STANDARD_FIELDS as STANDARD_FIELDS
from redrb.experience.fields import TENSOR_FIELDS as TENSOR_FIELDS
from redrb.experience.fields import Scalar as Scalar
from redrb.experience.fields import Side as Side
from redrb.experience.status import Status


@dataclass(eq=False)
class BufferItem:
    """One trainable sample: a prompt with its completion.

    S is the length of the sequence, A the number of actions, which are the last A tokens. All
    fields after `action_log_probs` are given by name, and are None where the sample has none.

    Attributes:
        sequences: Token ids, int64 `[S]`.
        action_log_probs: Log-probability of each action, float32 `[A]`.
        values: Critic's value, float32 `[A]` or `[]`.
        reward: Reward of the sample, float32 `[]`.
        kl: Divergence from the reference model, float32 `[A]` or `[]`.
        advantages: float32 `[A]` or `[]`.
        attention_mask: 1 for each token that counts, int64 or bool `[S]`; None: all count.
        action_mask: True for each action that counts, bool `[A]`; None: all count.
        tensors: Further tensors by name, any shape and dtype; within a batch only the first
            dimension may differ.
        policy_version: Weight version that made the sample; the oldest, if several did.
        token_versions: Weight version of each action, int64 `[A]`, -1 if it is unknown.
        status: Status of the rollout.
        group_id: Name of its group, the same for all completions of one prompt.
        tags: Scalars by name, for queries.
        extras: Values that msgpack can hold, such as messages, text, reward details. Those that
            would come back as others, such as tuples, are refused.
    """

    sequences: Tensor | None
    action_log_probs: Tensor | None
    _: KW_ONLY
    values: Tensor | None = None
    reward: Tensor | None = None
    kl: Tensor | None = None
    advantages: Tensor | None = None
    attention_mask: Tensor | None = None
    action_mask: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    policy_version: int | None = None
    token_versions: Tensor | None = None
    status: Status = Status.COMPLETED
    group_id: str | None = None
    tags: dict[str, Scalar] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Experience:
    """A padded batch of B samples.

    The tensors are those of `BufferItem` with a leading batch dimension: `sequences [B, S]`,
    `action_log_probs [B, A]`, `values [B, A]` or `[B]`, `reward [B]` and so on. Metadata is a list
    with one entry for each sample, or one value for all of them.

    Attributes:
        tensors: Further tensors by name, `[B, ...]`. Where the samples of `name` differ in their
            first dimension, it is padded with 0, and `<name>_lengths`, int64 `[B]`, has the
            dimension of each. A tensor of the shape of `sequences` has one entry a token, unless it
            has lengths.
        attention_mask: 1 for each token that counts, `[B, S]`; a batch that redrb makes has it.
        action_mask: True for each action that counts, `[B, A]`; a batch that redrb makes has it.
        group_index: Index of each sample's group within the batch, int64 `[B]`, counted from 0 in
            the order of the batch; None where the batch was not made of groups. It is not stored.
        padding_side: Side of the padding, which `split_experience_batch` removes.
    """

    sequences: Tensor | None
    action_log_probs: Tensor | None
    values: Tensor | None
    reward: Tensor | None
    kl: Tensor | None
    advantages: Tensor | None
    attention_mask: Tensor | None = None
    action_mask: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    policy_version: int | Sequence[int | None] | None = None
    token_versions: Tensor | None = None
    status: Status | Sequence[Status] = Status.COMPLETED
    group_id: str | Sequence[str | None] | None = None
    tags: Mapping[str, Scalar] | Sequence[Mapping[str, Scalar]] = field(default_factory=dict)
    extras: Mapping[str, Any] | Sequence[Mapping[str, Any]] = field(default_factory=dict)
    padding_side: Side = "left"
    group_index: Tensor | None = None

    def __len__(self) -> int:
        """Return B, the number of samples."""
        return batch_size(self)

    def to_device(self, device: str | torch.device) -> Self:
        """Move every tensor to `device` in place (None stays None) and return self."""
        return self._apply(lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()))

    def pin_memory(self) -> Self:
        """Pin every tensor in place for fast copies to an accelerator and return self.

        Without an accelerator the tensors stay as they are.
        """
        if not torch.accelerator.is_available():
            return self
        return self._apply(lambda tensor: tensor.pin_memory())

    def _apply(self, change: Callable[[Tensor], Tensor]) -> Self:
        for name in TENSOR_FIELDS:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, change(tensor))
        self.tensors = {name: change(tensor) for name, tensor in self.tensors.items()}
        if self.group_index is not None:
            self.group_index = change(self.group_index)
        return self


def check_tensors(tensors: object) -> None:
    """Raise RecordError unless `tensors` is a dict, as further tensors of a record are."""
    if not isinstance(tensors, Mapping):
        raise RecordError(
            f"tensors is a {type(tensors).__name__}, not a dict of tensors by name.",
            field="tensors",
        )


def named_tensors(record: BufferItem | Experience) -> dict[str, Tensor]:
    """Return all tensors of a record by name, standard fields first, or raise RecordError."""
    found = {name: getattr(record, name) for name in TENSOR_FIELDS}
    check_tensors(record.tensors)
    for name, tensor in record.tensors.items():
        if name in found:
            raise RecordError(
                f"tensors[{name!r}] has the name of a standard field: set the field itself.",
                field=name,
            )
        found[name] = tensor
    present = {name: tensor for name, tensor in found.items() if tensor is not None}
    for name, tensor in present.items():
        if not isinstance(tensor, Tensor):
            raise RecordError(
                f"{name} is a {type(tensor).__name__}, not a torch.Tensor: "
                "convert it with torch.as_tensor().",
                field=name,
            )
    return present


def batch_size(experience: Experience) -> int:
    """Return B, after a check that all tensors have the same batch size, or raise RecordError."""
    size: int | None = None
    first = ""
    for name, tensor in named_tensors(experience).items():
        if tensor.dim() == 0:
            raise RecordError(f"{name} has no batch dimension.", field=name)
        if size is None:
            size, first = tensor.shape[0], name
        elif tensor.shape[0] != size:
            raise RecordError(
                f"{name} holds {tensor.shape[0]} samples, {first} {size}: "
                "every field of an Experience needs the same batch size.",
                field=name,
            )
    if size is None:
        raise RecordError("the Experience holds no tensor at all.")
    return size


def per_sample(experience: Experience, name: str, size: int) -> list[Any]:
    """Return metadata of a batch by name, as a list of `size` values, or raise RecordError."""
    value = getattr(experience, name)
    maps = name in ("tags", "extras")
    if value is None or isinstance(value, Mapping if maps else str | int):
        return [value] * size
    if isinstance(value, str) or not isinstance(value, Sized):
        raise RecordError(
            f"{name} is a {type(value).__name__}: give a dict, or a list.", field=name
        )
    if len(value) != size:
        raise RecordError(
            f"{name} has {len(value)} entries for a batch of {size}: give one for each sample, or "
            "one for all.",
            field=name,
        )
    values: list[Any] = list(value)  # type: ignore[call-overload]
    if maps and not all(each is None or isinstance(each, Mapping) for each in values):
        raise RecordError(f"{name} has entries that are no dicts.", field=name)
    return values
