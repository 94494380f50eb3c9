"""The prompts of a maker's loop: batches from a user's loader, for epochs or a number of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from redrb.errors import ConfigError
from redrb.runtime.stopping import StopRequest


def prompt_batches(
    dataloader_fn: Callable[[], Iterable[Any]], epochs: int, steps: int, stop: StopRequest
) -> Iterator[Any]:
    """Yield batches of prompts; no batch is drawn from the loader without being yielded.

    Args:
        dataloader_fn: Returns a loader, anew for each epoch.
        epochs: Passes over the loader, if `steps` is 0.
        steps: Number of batches, over as many passes as they need; 0: `epochs` passes.
        stop: Ends the iteration.

    Raises:
        ConfigError: `steps` is above 0, and a loader has no batch.
    """
    done = 0
    for _ in iter(int, 1) if steps > 0 else range(epochs):
        before = done
        if stop:
            return
        for batch in dataloader_fn():
            yield batch
            done += 1
            if done == steps or stop:
                return
        if steps > 0 and done == before:
            raise ConfigError("dataloader_fn returned a loader without a single batch.")
