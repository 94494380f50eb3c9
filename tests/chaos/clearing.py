"""Deletes the tasks and the weights of a run as a user does."""

from __future__ import annotations

import redrb
from redrb.weights.inspection.removal import remove_weights
from tests.chaos import options


def clear(url: str) -> None:
    """Delete everything; the checker then looks for keys that are left."""
    with redrb.connect(url, retry_s=options.RETRY_S) as client:
        for task in (options.FLOW, options.STEPS):
            with redrb.ExperienceStream(client, task, namespace=options.NAMESPACE) as stream:
                stream.clear()
        remove_weights(client, options.WEIGHTS, namespace=options.NAMESPACE)
