"""`RolloutReader`: lets a stream take rollouts of a `ReplayBuffer` as samples for training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redrb.checks import checked_int_or_none
from redrb.compat.xtuner.rollout_fields import is_agentic, mask_of, steps_of
from redrb.compat.xtuner.rollout_packing import unpack_group
from redrb.errors import ConfigError, RecordError
from redrb.experience import BufferItem
from redrb.experience.fields import TENSOR_FIELDS

ARRAYS = (np.ndarray, Tensor)

_TAKEN = {*TENSOR_FIELDS, "routed_experts"}

NO_LABEL = -100
"""Label of a token that is not trained on."""


def rollout_sample(rollout: Mapping[str, Any]) -> BufferItem:
    """Return a rollout with XTuner's fields as a sample, S = prompt + response, A = response.

    | field of the rollout | field of the sample |
    |---|---|
    | `prompt_ids`, `response_ids` | `sequences`, int64 `[S]`, with an `attention_mask` of 1 |
    | `logprobs`; may be missing | `action_log_probs`, float32 `[A]` |
    | `response_mask`; missing: all count | `action_mask`, bool `[A]` |
    | `reward`: a number, or a dict with `score` | `reward`, float32 `[]` |
    | `response_model_steps` | `token_versions`, int64 `[A]`; `policy_version` is the oldest |
    | `mm_info`: arrays by name | `tensors` of these names, such as `pixel_values` |
    | `mm_info`: anything else | `extras["mm_info"]` |
    | `routed_experts`: an array, or a list of those of a trace | `tensors["routed_experts"]` |

    `values`, `kl` and `advantages` are None. A rollout with `input_ids` and `labels` is read from
    these: its actions begin at the first token, after the one at 0, whose label is not -100, those
    with the label -100 do not count, and `logprobs` has one entry for each of the `input_ids`. Its
    `token_versions` are missing unless it has a step for each action.

    Raises:
        RecordError: A field is missing or is not of this form.
    """
    agentic = rollout.get("input_ids") is not None
    item = _of_trace(rollout) if agentic else _of_response(rollout)
    actions = 0 if item.action_mask is None else len(item.action_mask)
    item.reward = _reward(rollout.get("reward"))
    steps = steps_of(rollout)
    if steps:
        if not agentic or len(steps) == actions:
            item.token_versions = _numbers(rollout, "response_model_steps", actions).long()
        item.policy_version = min(steps)
    info, experts = rollout.get("mm_info"), rollout.get("routed_experts")
    if info is not None and not isinstance(info, Mapping):
        raise RecordError(f"mm_info is {info!r:.80}, not a dict.", field="mm_info")
    for name, value in (info or {}).items():
        if isinstance(value, ARRAYS) and name in _TAKEN:
            raise RecordError(
                f"mm_info holds an array {name!r}, as a field of samples is named: give it another "
                "name, or RolloutReader a function.",
                field="mm_info",
            )
        if isinstance(value, ARRAYS):
            item.tensors[name] = _tensor("mm_info", value)
        elif value is not None:
            item.extras.setdefault("mm_info", {})[name] = value
    if experts is not None:
        item.tensors["routed_experts"] = _tensor("routed_experts", experts)
    group = rollout.get("group_id")
    item.group_id = None if group is None else str(group)
    return item


class RolloutReader:
    """Converts groups that a `ReplayBuffer` has put, when a stream takes them.

    Loaders, ranks, trainers and mixtures that use the stream get samples. Groups that a stream has
    put are not converted. The buffer's consumer group is "replay": a stream of another consumer
    group takes each group once more. Objects that were put as Ray ObjectRefs are in the samples
    themselves.

    Examples:
        >>> stream = ExperienceStream(client, "math", group="replay", reader=RolloutReader())
        >>> with stream.take(32) as lease:
        ...     train(lease.batch())
    """

    def __init__(
        self,
        sample: Callable[[dict[str, Any]], BufferItem] = rollout_sample,
        *,
        token_stale_threshold: int | None = None,
        train_step: Callable[[], int] | None = None,
    ) -> None:
        """Make a reader.

        Args:
            sample: Returns the sample of a rollout, which it gets as a dict of its fields.
            token_stale_threshold: Tokens of this staleness do not count: their `response_mask` is
                0, as XTuner's trainer sets it. Groups with `input_ids` or `labels` skip this rule.
            train_step: Returns the trainer's step when a group is read; with the threshold only.

        Raises:
            ConfigError: One of the two is missing, or the threshold is below 1.
        """
        self._sample = sample
        self._threshold = checked_int_or_none("token_stale_threshold", token_stale_threshold, 1)
        if (token_stale_threshold is None) != (train_step is None):
            raise ConfigError("token_stale_threshold and train_step need each other: give both.")
        self._train_step = train_step

    def __call__(self, items: list[BufferItem]) -> list[BufferItem]:
        """Return the samples of a group of rollouts.

        Raises:
            DecodeError: The group is malformed.
            RecordError: A rollout cannot be converted.
        """
        group = unpack_group(items)
        if self._train_step is not None and self._threshold is not None and not is_agentic(group):
            for rollout in group:
                _mask_stale(rollout, self._train_step() - 1 - self._threshold)
        samples = list(map(self._sample, group))
        for item, sample in zip(items, samples, strict=True):
            sample.status, sample.group_id = item.status, samples[0].group_id
        return samples


def _of_response(rollout: Mapping[str, Any]) -> BufferItem:
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
    return item


def _of_trace(rollout: Mapping[str, Any]) -> BufferItem:
    sequences = _tokens(rollout, "input_ids")
    counts = _numbers(rollout, "labels", len(sequences)) != NO_LABEL
    counted = counts[1:].nonzero()
    if not len(counted):
        raise RecordError("labels of a rollout hold no token that counts.", field="labels")
    begin = int(counted[0]) + 1
    item = BufferItem(sequences, None, attention_mask=torch.ones_like(sequences))
    if rollout.get("logprobs") is not None:
        item.action_log_probs = _numbers(rollout, "logprobs", len(sequences)).float()[begin:]
    item.action_mask = counts[begin:]
    return item


def _mask_stale(rollout: dict[str, Any], newest: int) -> None:
    """Set the mask of response tokens to 0 whose model step is at most `newest`."""
    steps, mask = steps_of(rollout), mask_of(rollout)
    if steps:
        given = [True] * len(steps) if mask is None else mask
        fresh = [step > newest for step in steps]
        rollout["response_mask"] = [each and new for each, new in zip(given, fresh, strict=False)]


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


def _tensor(name: str, value: Any) -> Tensor:
    try:
        if isinstance(value, list) and value and all(isinstance(each, ARRAYS) for each in value):
            return torch.cat(list(map(torch.as_tensor, value)))[1:]  # the first: as XTuner does
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RecordError(f"{name} holds no array of numbers: {error}", field=name) from error


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
