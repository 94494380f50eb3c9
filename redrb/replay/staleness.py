"""How stale a rollout is, and when it expires: XTuner v1's rules, without any store.

Fully on-policy, the train step leads the model step by one. So a rollout's staleness is
`train step - oldest model step among its response tokens - 1`, and 0 where no token has a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redrb.errors import ConfigError, RecordError
from redrb.experience import Status
from redrb.replay.rollout_fields import STEPS_END, is_agentic, mask_of, read, steps_of

EXPIRABLE = (Status.INIT, Status.COMPLETED, Status.ABORTED)
"""Statuses of groups that may expire on arrival; the others are over already."""

FRESHEST = STEPS_END
"""Stands for the version of a group that is not stale at all; a float holds it exactly."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When rollouts expire.

    Attributes:
        sequence: Staleness from which on a rollout expires; None: never.
        token: Staleness of all its tokens from which on it expires; None: never.
    """

    sequence: int | None = None
    token: int | None = None

    def __post_init__(self) -> None:
        for what, value in (("stale", self.sequence), ("token_stale", self.token)):
            if value is not None and value <= 0:
                raise ConfigError(
                    f"{what}_threshold={value}: it must be at least 1, since staleness 0 is "
                    "fully on-policy; None turns the rule off."
                )


def oldest_step(rollout: Any) -> int | None:
    """Return the oldest model step among the response tokens; None where no token has one."""
    return min(steps_of(rollout), default=None)


def newest_step(rollout: Any) -> int | None:
    """Return the newest model step among the tokens that count; None where none has one."""
    steps, mask = steps_of(rollout), mask_of(rollout)
    if mask is not None:
        steps = [step for step, counts in zip(steps, mask, strict=False) if counts]
    return max(steps, default=None)


def step_staleness(step: int | None, train_step: int) -> int:
    """Return the staleness of what the model made at `step`."""
    return 0 if step is None else train_step - step - 1


def staleness(rollout: Any, train_step: int | None) -> int:
    """Return a rollout's staleness; without a train step what its own `seq_staleness` says."""
    if train_step is not None:
        return step_staleness(oldest_step(rollout), train_step)
    own = read(rollout, "seq_staleness")
    if own is None:
        return 0
    if isinstance(own, bool) or not isinstance(own, int) or abs(own) >= STEPS_END:
        raise RecordError(
            f"seq_staleness is {own!r:.80}, not a number of steps.", field="seq_staleness"
        )
    return own


def expired_members(
    group: Sequence[Any], train_step: int | None, thresholds: Thresholds
) -> list[Any]:
    """Return the members that are too stale; one of them expires the group.

    Args:
        group: Rollouts of one prompt.
        train_step: The trainer's step; None: `seq_staleness` stands, and tokens have no staleness.
        thresholds: When rollouts expire.
    """
    token = None if is_agentic(group) else thresholds.token
    return [
        rollout
        for rollout in group
        if _is_too_stale(rollout, train_step, thresholds.sequence)
        or _tokens_are_too_stale(rollout, train_step, token)
    ]


def version_to_order_by(group: Sequence[Any], train_step: int | None, heard: int) -> int:
    """Return the policy version that the order "stalest" takes a group by; lowest first.

    It is the oldest model step of all members. Where the rollouts' own `seq_staleness` stands, it
    is the version that has this staleness at the newest train step the buffer has heard of; a group
    that neither has steps nor says it is stale comes last.

    Args:
        group: Rollouts of one prompt, before any of them is reset.
        train_step: What `put` was told.
        heard: The newest train step that this buffer was told in any call.
    """
    if train_step is None:
        own = max(staleness(rollout, None) for rollout in group)
        if own > 0:
            return heard - own - 1
    steps = [step for rollout in group if (step := oldest_step(rollout)) is not None]
    if steps:
        return min(steps)
    return FRESHEST if train_step is None else train_step - 1


def _is_too_stale(rollout: Any, train_step: int | None, threshold: int | None) -> bool:
    return threshold is not None and staleness(rollout, train_step) >= threshold


def _tokens_are_too_stale(rollout: Any, train_step: int | None, threshold: int | None) -> bool:
    if threshold is None or train_step is None:
        return False
    newest = newest_step(rollout)
    return newest is not None and step_staleness(newest, train_step) >= threshold
