"""What becomes of rollouts that arrive or expire: the caller's own objects are changed in place."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from redrb.errors import RecordError
from redrb.experience import Status
from redrb.experience.status import group_status
from redrb.replay.rollout_fields import has, length, read, status_of, steps_of, write, write_status
from redrb.replay.staleness import EXPIRABLE, Thresholds, expired_members, staleness

_LOST: tuple[tuple[str, Any], ...] = (
    ("response", ""),
    ("response_ids", []),
    ("logprobs", []),
    ("response_model_steps", []),
    ("response_mask", None),
    ("routed_experts", None),
    ("finish_reason", None),
    ("reward", None),
    ("error_msg", None),
    ("input_ids", None),
    ("labels", None),
)
"""What a rollout loses that is to be made again, and what stands there afterwards."""

_RELEASED: tuple[tuple[str, Any], ...] = (
    ("prompt_ids", None),
    ("tokens", None),
    ("mm_info", None),
    ("extra_fields", {}),
)
"""What a rollout loses besides when it is discarded."""


def fill_steps(group: Iterable[Any], model_step: int) -> None:
    """Give every response token that has no model step this one."""
    for rollout in group:
        steps = steps_of(rollout)
        missing = length(rollout, "response_ids") - len(steps)
        if missing > 0:
            write(rollout, "response_model_steps", [*steps, *[model_step] * missing])


def refresh(group: Iterable[Any], train_step: int) -> None:
    """Write every rollout's staleness at `train_step`, where it has a field for it."""
    for rollout in group:
        if has(rollout, "seq_staleness"):
            write(rollout, "seq_staleness", staleness(rollout, train_step))


def too_stale(group: Sequence[Any], train_step: int | None, thresholds: Thresholds) -> list[Any]:
    """Return the members for whose sake a group that arrives is expired; empty: it is not.

    Groups that failed, were filtered, expired or archived before stay what they are.
    """
    if group_status(map(status_of, group)) not in EXPIRABLE:
        return []
    return expired_members(group, train_step, thresholds)


def expire(rollouts: Iterable[Any]) -> None:
    """Make rollouts expired, and take them back to their prompts."""
    for rollout in rollouts:
        write_status(rollout, Status.EXPIRED)
        reset(rollout)


def discard(group: Iterable[Any]) -> None:
    """Make rollouts expired that are not to be made again: nothing heavy is left in them."""
    for rollout in group:
        write_status(rollout, Status.EXPIRED)
        reset(rollout)
        release(rollout)


def reset(rollout: Any) -> None:
    """Take a rollout back to its prompt, for a new response.

    Prompt, multimodal input, extra fields and what names it stay. `input_ids` and `labels`, which
    hold the old response, go.
    """
    for name, value in _LOST:
        if has(rollout, name):
            write(rollout, name, copy.copy(value))
    if has(rollout, "tokens"):
        prompt = read(rollout, "prompt_ids")
        write(
            rollout, "tokens", list(prompt) if isinstance(prompt, list) else copy.deepcopy(prompt)
        )


def release(rollout: Any) -> None:
    """Drop what else is heavy in a rollout that nobody will look at again."""
    for name, value in _RELEASED:
        if has(rollout, name):
            with suppress(RecordError):  # a class that insists on its prompt keeps it
                write(rollout, name, copy.copy(value))
