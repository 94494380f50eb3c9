"""Staleness of rollouts, and their expiry: the rules are those of XTuner v1.

Fully on-policy, the train step is one ahead of the model step. So a rollout's staleness is
`train step - oldest model step among its response tokens - 1`, and 0 if no token has a step. The
caller's objects are changed in place.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from redrb.compat.xtuner.rollout_fields import (
    STEPS_END,
    counted_tokens,
    has,
    is_agentic,
    length,
    read,
    status_of,
    steps_of,
    write,
    write_status,
)
from redrb.errors import ConfigError, RecordError
from redrb.experience import Status
from redrb.experience import status as statuses

AGEING = (Status.COMPLETED, Status.ABORTED, Status.EXPIRED)
"""Statuses of groups whose rollouts may expire; groups of other statuses are finished."""

FRESHEST = STEPS_END
"""Version of a group that never becomes stale; a double represents it exactly."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Staleness at which rollouts expire.

    Attributes:
        sequence: A rollout of this staleness expires; None: none does.
        token: A rollout expires if all its tokens that count are this stale or without a step;
            None: none does.
    """

    sequence: int | None = None
    token: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("stale", self.sequence), ("token_stale", self.token)):
            if value is not None and value <= 0:
                raise ConfigError(
                    f"{name}_threshold={value}: it must be at least 1, because staleness 0 is "
                    "fully on-policy; None turns the rule off."
                )


def group_status(group: Iterable[Any]) -> Status:
    """Return a group's status: init and archived ones count as completed, as in XTuner."""
    found = statuses.group_status(map(status_of, group))
    return Status.COMPLETED if found in (Status.INIT, Status.ARCHIVED) else found


def staleness(rollout: Any, train_step: int | None) -> int:
    """Return a rollout's staleness; without a train step, its `seq_staleness`."""
    if train_step is not None:
        return train_step - min(steps_of(rollout), default=train_step - 1) - 1
    stored = read(rollout, "seq_staleness")
    if stored is None:
        return 0
    if isinstance(stored, bool) or not isinstance(stored, int) or abs(stored) >= STEPS_END:
        raise RecordError(
            f"seq_staleness is {stored!r:.80}, not a number of steps.", field="seq_staleness"
        )
    return stored


def expired_members(
    group: Sequence[Any], train_step: int | None, thresholds: Thresholds
) -> list[Any]:
    """Return the rollouts that are expired or too stale; a single one expires the group.

    Without a train step none is too stale.
    """
    if train_step is None:
        return []
    agentic = is_agentic(group)

    def is_expired(rollout: Any) -> bool:
        sequence = thresholds.sequence
        if status_of(rollout) is Status.EXPIRED:
            return True
        if sequence is not None and staleness(rollout, train_step) >= sequence:
            return True
        if agentic or thresholds.token is None:
            return False
        counts, newest = counted_tokens(rollout), train_step - 1 - thresholds.token
        return counts is not None and not any(
            counted and step > newest
            for step, counted in zip(steps_of(rollout), counts, strict=True)
        )

    return list(filter(is_expired, group))


def version_to_order_by(
    group: Sequence[Any], train_step: int | None, newest_train_step: int
) -> int:
    """Return the policy version by which the order "stalest" sorts a group, lowest first.

    It is the oldest model step of all rollouts. If `put` gives no train step and `seq_staleness` is
    above 0, it is the version of this staleness at `newest_train_step`. A group that has neither
    comes last: it never becomes stale. Groups that do not age are sorted by their `seq_staleness`.

    Args:
        group: Rollouts of one prompt, before any of them is reset.
        train_step: The `current_train_step` of the put.
        newest_train_step: The newest train step of all calls of this buffer.
    """
    if group_status(group) not in AGEING:
        return -max(staleness(rollout, None) for rollout in group)
    if train_step is None:
        stored = max(staleness(rollout, None) for rollout in group)
        if stored > 0:
            return newest_train_step - stored - 1
    return min((step for rollout in group for step in steps_of(rollout)), default=FRESHEST)


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


def write_staleness(group: Sequence[Any], train_step: int) -> None:
    """Write the staleness at `train_step` into the rollouts that have a field for it.

    Groups that do not age keep theirs.
    """
    for rollout in group if group_status(group) in AGEING else ():
        if has(rollout, "seq_staleness"):
            write(rollout, "seq_staleness", staleness(rollout, train_step))


def too_stale(group: Sequence[Any], train_step: int | None, thresholds: Thresholds) -> list[Any]:
    """Return the rollouts that expire when their group arrives; empty: it keeps its status."""
    return expired_members(group, train_step, thresholds) if group_status(group) in AGEING else []


def end(group: Sequence[Any], train_step: int | None) -> None:
    """Set a group to expired with its last staleness, as its hook gets it before it is reset."""
    if train_step is not None:
        write_staleness(group, train_step)
    for rollout in group:
        write_status(rollout, Status.EXPIRED)


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
