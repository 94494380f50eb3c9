"""`RolloutGroups`: a recipe's `rollout` for each of many prompts; a failed one costs its group."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import torch
from torch import nn

from redrb.algorithms.event_loop import submit
from redrb.algorithms.models import evaluating
from redrb.algorithms.reward import TOGETHER_S
from redrb.errors import RecordError
from redrb.experience import BufferItem, Experience, make_experience_batch, split_experience_batch
from redrb.experience.faults import Fault, fault_extra, log_filtered, raised
from redrb.recipe.group_names import group_names
from redrb.recipe.recipe import Prompt, Recipe

_log = logging.getLogger("redrb")

GRACE_S = 10.0
"""How long the time limit of a rollout may be late, because it blocks its event loop."""

Arrived: TypeAlias = tuple[Prompt, Any]
"""A prompt, and what its rollout returned or raised."""


class RolloutGroups:
    """Calls a recipe's `rollout` for each prompt; coroutines run at the same time.

    A rollout that raises, returns no samples, or lasts longer than `rollout_timeout` costs only its
    group; the log says why, and `take_failed` counts it.
    """

    makes_parts = True
    parts_use_models = True

    def __init__(self, recipe: Recipe, models: dict[str, nn.Module]) -> None:
        self._recipe, self._models = recipe, models
        self._names = group_names(recipe)
        self._failed = 0
        self._explained = False
        self._stopped = False
        self._done: SimpleQueue[Arrived | None] = SimpleQueue()

    def stop(self) -> None:
        """Begin no further rollout; coroutines that run have half of `stop_timeout` to end.

        Another thread or a signal handler may call it.
        """
        self._stopped = True
        self._done.put(None)

    def take_failed(self) -> int:
        """Return how many groups have failed since the last call."""
        failed, self._failed = self._failed, 0
        return failed

    def make_experience(self, inputs: Sequence[Prompt], **options: Any) -> Experience:
        """Return the samples of all prompts; those of one prompt are one group.

        Raises:
            RecordError: Every rollout failed.
        """
        parts = list(self.make_parts(inputs, **options))
        if not parts:
            raise RecordError("every rollout of a batch of prompts failed: the log says why.")
        items = [item for part in parts for item in split_experience_batch(part)]
        return parts[0] if len(parts) == 1 else make_experience_batch(items)

    @torch.no_grad()
    def make_parts(self, inputs: Sequence[Prompt], **_options: Any) -> Iterator[Experience]:
        """Yield the groups of all prompts in parts, as they are ready."""
        self._done = SimpleQueue()
        futures: list[Future[None]] = []
        with evaluating(*self._models.values()):
            try:
                yield from self._begun(inputs, futures)
                yield from self._awaited(len(futures))
            finally:
                for future in futures:
                    future.cancel()

    def _begun(
        self, prompts: Sequence[Prompt], futures: list[Future[None]]
    ) -> Iterator[Experience]:
        """Call all rollouts; yield the groups of those that are no coroutines."""
        ready: list[BufferItem] = []
        sent_at = time.monotonic()
        for prompt in prompts:
            if self._stopped:
                break
            try:
                found: Any = self._recipe.rollout(self._models, prompt)
            except Exception as error:  # noqa: BLE001 (the user's function: its group is filtered)
                found = error
            if inspect.isawaitable(found):
                futures.append(submit(self._one(prompt, found, self._done)))
                continue
            ready += self._group(prompt, found)
            if ready and time.monotonic() - sent_at >= TOGETHER_S:
                yield make_experience_batch(ready)
                ready, sent_at = [], time.monotonic()
        if ready:
            yield make_experience_batch(ready)

    def _awaited(self, count: int) -> Iterator[Experience]:
        """Yield the groups of coroutines; at the end those that run longer are given up."""
        deadline = time.monotonic() + self._recipe.rollout_timeout + GRACE_S
        asked = False
        while count:
            if self._stopped and not asked:
                asked = True
                deadline = min(deadline, time.monotonic() + self._recipe.stop_timeout / 2)
            arrived = self._arrived(deadline)
            if arrived is None:
                if not self._stopped:
                    self._failed += count
                fault = Fault("the rollout", "did not end in time", "late rollout")
                extra = None if self._stopped else fault_extra(fault, count)
                _log.warning(
                    "%d rollouts are given up: they did not end in time", count, extra=extra
                )
                return
            count -= len(arrived)
            if items := [item for prompt, found in arrived for item in self._group(prompt, found)]:
                yield make_experience_batch(items)

    def _arrived(self, deadline: float) -> list[Arrived] | None:
        """Wait for a result or `stop`; return all results that are there; None: it is too late."""
        try:
            arrived = [self._done.get(timeout=max(0.0, deadline - time.monotonic()))]
        except Empty:
            return None
        while not self._done.empty():
            arrived.append(self._done.get())
        return [each for each in arrived if each is not None]

    async def _one(
        self, prompt: Prompt, rollout: Awaitable[Any], done: SimpleQueue[Arrived | None]
    ) -> None:
        try:
            async with asyncio.timeout(self._recipe.rollout_timeout):
                found = await rollout
        except Exception as error:  # noqa: BLE001 (the user's function: its group is filtered)
            found = error
        done.put((prompt, found))

    def _group(self, prompt: Prompt, found: Any) -> list[BufferItem]:
        """Return the samples of a group, with its name; none if its rollout failed."""
        try:
            items = _samples(found)
        except Exception as error:  # noqa: BLE001 (what a rollout returned or raised)
            self._failed += 1
            _log.warning(
                "a group is filtered: the rollout of the prompt %.200r raised %s: %.500s",
                *(prompt, type(error).__name__, error),
                exc_info=None if self._explained else error,
                extra=fault_extra(raised("the rollout", error)),
            )
            self._explained = True
            return []
        _report_bad_rewards(items)
        name = next(self._names)
        for item in items:
            item.group_id = name
        return items


def _report_bad_rewards(group: Sequence[BufferItem]) -> None:
    """Log a group whose rewards are not all numbers; the task drops it."""
    rewards = [item.reward for item in group if item.reward is not None]
    bad = sum(not bool(reward.isfinite().all()) for reward in rewards)
    if bad:
        fault = Fault(
            "the reward", "that the rollout returned is nan or infinite", "rollout reward"
        )
        text = "a group is filtered: %s, of %d of its %d samples"
        log_filtered(fault, text, fault, bad, len(group))


def _samples(found: Any) -> list[BufferItem]:
    """Return what a rollout returned as samples."""
    if isinstance(found, BaseException):
        raise found
    items = split_experience_batch(found) if isinstance(found, Experience) else found
    usable = isinstance(items, list | tuple)
    if not usable or not items or not all(isinstance(item, BufferItem) for item in items):
        raise RecordError(f"it returned {found!r:.80}: return the samples of the prompt.")
    return list(items)
