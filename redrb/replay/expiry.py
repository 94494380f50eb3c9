"""Changes to rollouts that arrive or expire; the caller's objects are changed in place."""

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

_RESET: tuple[tuple[str, Any], ...] = (
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
"""Fields that are reset when a rollout is made again, and their new values."""

_HEAVY: tuple[tuple[str, Any], ...] = (
    ("prompt_ids", None),
    ("tokens", None),
    ("mm_info", None),
    ("extra_fields", {}),
)
"""Further fields that are reset when a rollout expires for good, and their new values."""


def fill_steps(group: Iterable[Any], model_step: int) -> None:
    """Set the model step of all response tokens that have none."""
    for rollout in group:
        steps = steps_of(rollout)
        missing = length(rollout, "response_ids") - len(steps)
        if missing > 0:
            write(rollout, "response_model_steps", [*steps, *[model_step] * missing])


def write_staleness(group: Iterable[Any], train_step: int) -> None:
    """Write the staleness at `train_step` into every rollout that has a field for it."""
    for rollout in group:
        if has(rollout, "seq_staleness"):
            write(rollout, "seq_staleness", staleness(rollout, train_step))


def too_stale(group: Sequence[Any], train_step: int | None, thresholds: Thresholds) -> list[Any]:
    """Return the rollouts that are too stale when their group arrives; empty: it does not expire.

    Groups that failed, or were filtered, expired or archived before, keep their status.
    """
    if group_status(map(status_of, group)) not in EXPIRABLE:
        return []
    return expired_members(group, train_step, thresholds)


def expire(rollouts: Iterable[Any], *, for_good: bool = False) -> None:
    """Set rollouts to expired and reset them to their prompts, for new responses.

    Prompt, multimodal input, extra fields and ids stay, unless they expire `for_good`. `input_ids`
    and `labels` are reset, because they hold the old response.
    """
    for rollout in rollouts:
        write_status(rollout, Status.EXPIRED)
        for name, value in _RESET:
            if has(rollout, name):
                write(rollout, name, copy.copy(value))
        if has(rollout, "tokens"):
            prompt = read(rollout, "prompt_ids")
            tokens = list(prompt) if isinstance(prompt, list) else copy.deepcopy(prompt)
            write(rollout, "tokens", tokens)
        for name, value in _HEAVY if for_good else ():
            if has(rollout, name):
                with suppress(RecordError):  # a class may refuse to lose its prompt
                    write(rollout, name, copy.copy(value))
