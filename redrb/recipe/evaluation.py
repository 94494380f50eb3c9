"""The metrics of an evaluation: the mean reward of held-out prompts, and how many failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any


def evaluation_of(found: Sequence[tuple[float, str]]) -> dict[str, Any]:
    """Return the metrics of an evaluation.

    Args:
        found: The reward of each held-out prompt and "", or nan and why it has none.

    Returns:
        `reward`, the mean of the rewards that are there, None if there is none; `samples` and
        `failed`, how many prompts have a reward and how many have none; with failed ones
        `why_failed`, their most frequent reason.
    """
    rewards = [reward for reward, why in found if not why]
    reasons = Counter(why for _, why in found if why)
    metrics: dict[str, Any] = {
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "samples": len(rewards),
        "failed": reasons.total(),
    }
    if reasons:
        [(metrics["why_failed"], _)] = reasons.most_common(1)
    return metrics
