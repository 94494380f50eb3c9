"""`RolloutReader`: lets a stream take rollouts of a `ReplayBuffer` as samples for training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from redrb.compat.xtuner.rollout_fields import mask_of, steps_of
from redrb.compat.xtuner.rollout_packing import unpack_group
from redrb.errors import RecordError
from redrb.experience import BufferItem


def rollout_sample(rollout: Mapping[str, Any]) -> BufferItem:
    """Return a rollout with XTuner's fields as a sample, S = prompt + response, A = response.

    | field of the rollout | field of the sample |
    |---|---|
    | `prompt_ids`, `response_ids` | `sequences`, int64 `[S]`, with an `attention_mask` of 1 |
    | `logprobs`; may be missing | `action_log_probs`, float32 `[A]` |
    | `response_mask`; missing: all count | `action_mask`, bool `[A]` |
    | `reward`: a number, or a dict with `score` | `reward`, float32 `[]` |
    | `response_model_steps` | `token_versions`, int64 `[A]`; `policy_version` is the oldest |

    `values`, `kl` and `advantages` are None.

    Raises:
        RecordError: A field is missing or is not of this form.
    """
    prompt, response = _tokens(rollout, "prompt_ids"), _tokens(rollout, "response_ids")
    actions = len(response)
    if not actions:
        raise RecordError("a rollout has no response_ids.", field="response_ids")
    sequences = torch.cat([prompt, response])
    item = BufferItem(sequences, None, attention_mask=torch.ones_like(sequences))
    if rollout.get("logprobs") is not None:
        item.action_log_probs = _numbers(rollout, "logprobs", actions).float()
    mask = mask_of(rollout)
    item.action_mask = torch.tensor([True] * actions if mask is None else mask)
    if len(item.action_mask) != actions:
        raise _wrong("response_mask", f"{len(item.action_mask)} entries", actions)
    item.reward = _reward(rollout.get("reward"))
    steps = steps_of(rollout)
    if steps:
        item.token_versions = _numbers(rollout, "response_model_steps", actions).long()
        item.policy_version = min(steps)
    group = rollout.get("group_id")
    item.group_id = None if group is None else str(group)
    return item


class RolloutReader:
    """Converts groups that a `ReplayBuffer` has put, when a stream takes them.

    Loaders, ranks, trainers and mixtures that use the stream get samples. Groups that a stream has
    put are not converted. The buffer's consumer group is "replay": a stream of another consumer
    group takes each group once more.

    Examples:
        >>> stream = ExperienceStream(client, "math", group="replay", reader=RolloutReader())
        >>> with stream.take(32) as lease:
        ...     train(lease.batch())
    """

    def __init__(self, sample: Callable[[dict[str, Any]], BufferItem] = rollout_sample) -> None:
        """Make a reader.

        Args:
            sample: Returns the sample of a rollout, which it gets as a dict of its fields.
        """
        self._sample = sample

    def __call__(self, items: list[BufferItem]) -> list[BufferItem]:
        """Return the samples of a group of rollouts.

        Raises:
            DecodeError: The group is malformed.
            RecordError: A rollout cannot be converted.
        """
        group = unpack_group(items)
        samples = [self._sample(rollout.state) for rollout in group]
        for item, sample in zip(items, samples, strict=True):
            sample.status, sample.group_id = item.status, samples[0].group_id
        return samples


def _tokens(rollout: Mapping[str, Any], name: str) -> Tensor:
    return _numbers(rollout, name, None).long()


def _numbers(rollout: Mapping[str, Any], name: str, length: int | None) -> Tensor:
    value = rollout.get(name)
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _wrong(name, f"{value!r:.80}", length) from error
    if tensor.dim() != 1 or (length is not None and len(tensor) != length):
        raise _wrong(name, f"of shape {list(tensor.shape)}", length)
    return tensor


def _reward(value: Any) -> Tensor | None:
    if isinstance(value, Mapping):
        value = value.get("score")
    if value is None:
        return None
    try:
        return torch.tensor(float(value))
    except (TypeError, ValueError) as error:
        raise RecordError(
            f"reward is {value!r:.80}, not a number or a dict with the number `score`.",
            field="reward",
        ) from error


def _wrong(name: str, came: str, length: int | None) -> RecordError:
    tokens = "token" if length is None else f"of {length} tokens"
    return RecordError(f"{name} is {came}, not a list of one number for each {tokens}.", field=name)
