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
        dataloader_fn: Returns the loader; it is called once.
        epochs: Passes over the loader, if `steps` is 0.
        steps: Number of batches, over as many passes as they need; 0: `epochs` passes.
        stop: Ends the iteration.

    Raises:
        ConfigError: `steps` is above 0, and the loader has no batch; or another pass is needed over
            an iterator, which yields its batches once.
    """
    if stop:
        return
    done, loader = 0, dataloader_fn()
    if steps <= 0 and epochs > 1:
        _check_repeatable(loader)
    for _ in iter(int, 1) if steps > 0 else range(epochs):
        before = done
        for batch in loader:
            yield batch
            done += 1
            if done == steps or stop:
                return
        if steps > 0 and done == before:
            raise ConfigError("dataloader_fn returned a loader without a single batch.")
        if steps > 0:
            _check_repeatable(loader)


def _check_repeatable(loader: Iterable[Any]) -> None:
    if isinstance(loader, Iterator):
        raise ConfigError(
            f"dataloader_fn returned a {type(loader).__name__}, which yields its batches once, and "
            "it is called once for all passes: return a DataLoader, a list, or another object that "
            "can be iterated over again."
        )
