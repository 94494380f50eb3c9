"""`redrb-maker`: samples completions with the newest weights, scores them, puts them into the task.

Any number of makers may run; one may start late, end or die at any time.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
import uuid
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from redrb.errors import ConfigError, RedrbError, StoreFull, StoreUnavailable
from redrb.options import add_options, settings_from
from redrb.telemetry import MetricsLog
from workers.settings import MakerSettings, RolloutSettings, RunSettings
from workers.stopping import Stop
from workers.waiting import SLICE_S, wait_in_slices

if TYPE_CHECKING:
    from redrb import BufferItem, Client, WeightSubscriber


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a maker until it is told to end; returns the exit status."""
    parser = argparse.ArgumentParser(prog="redrb-maker", description=__doc__)
    add_options(parser, RunSettings, MakerSettings, RolloutSettings)
    options = parser.parse_args(arguments)
    try:
        run = settings_from(options, RunSettings)
        own = settings_from(options, MakerSettings)
        rollout = settings_from(options, RolloutSettings)
    except ConfigError as error:
        print(f"redrb-maker: {error}", file=sys.stderr)
        return 2
    name = own.worker or _new_name()
    stop = Stop()
    import redrb

    try:
        with redrb.connect(run.url) as client, MetricsLog(run.metrics, worker=name) as metrics:
            Maker(client, name, run, own, rollout, metrics).work(stop)
    except RedrbError as error:
        print(f"redrb-maker {name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


class Maker:
    """Makes experience with the newest published policy."""

    def __init__(
        self,
        client: Client,
        name: str,
        run: RunSettings,
        own: MakerSettings,
        rollout: RolloutSettings,
        metrics: MetricsLog,
    ) -> None:
        """Open the task."""
        import torch

        from redrb import ExperienceStream, WeightSubscriber
        from workers.policy import ActorCritic

        torch.set_num_threads(run.threads)
        self._name = name
        self._own = own
        self._rollout = rollout
        self._metrics = metrics
        self._stream = ExperienceStream(client, run.task, namespace=run.namespace, limit=run.limit)
        self._generator = torch.Generator().manual_seed(_seed(run.seed, name))
        self._retry_s = client.retry_s
        self._reference, self._policy = ActorCritic(), ActorCritic()
        self._first_weights, self._weights = (
            WeightSubscriber(client, weights, namespace=run.namespace)
            for weights in (f"{run.weights}-reference", run.weights)
        )

    def work(self, stop: Stop) -> None:
        """Make groups and put them, with the newest weights each time, until told to end.

        Raises:
            WeightTimeout: No trainer published weights in time.
        """
        with self._stream:
            self._metrics.write("start")
            self._wait_for(self._first_weights, stop)
            self._wait_for(self._weights, stop)
            if not stop:
                self._first_weights.poll(self._reference)
                self._make_and_put(stop)

    def _wait_for(self, weights: WeightSubscriber, stop: Stop) -> None:
        """Wait until there are weights, or until asked to end."""
        wait_in_slices(
            lambda seconds: weights.wait(newer_than=0, timeout=seconds),
            stop.__bool__,
            timeout=self._own.weights_timeout,
            retry_s=self._retry_s,
        )

    def _make_and_put(self, stop: Stop) -> None:
        """Go on until told to end, or until all steps are done."""
        step = 0
        while not stop and (self._own.steps == 0 or step < self._own.steps):
            step += 1
            self._weights.poll(self._policy)
            started = time.perf_counter()
            groups = self._make(step)
            made = time.perf_counter()
            stored = self._put(groups, stop)
            self._metrics.write(
                "put",
                step=step,
                groups=stored,
                samples=sum(map(len, groups[:stored])),
                policy_version=self._weights.version,
                reward=_mean_reward(groups),
                make_s=made - started,
                backpressure_s=time.perf_counter() - made,
            )

    def _make(self, step: int) -> list[list[BufferItem]]:
        """Return one group of scored completions a prompt."""
        from redrb import split_experience_batch
        from workers.rollout import make_experience
        from workers.sorting import sample_prompts, show

        prompts = sample_prompts(self._generator, self._own.prompts)
        experience = make_experience(
            self._policy,
            self._reference.actor,
            prompts,
            generator=self._generator,
            settings=self._rollout,
            policy_version=self._weights.version,
        )
        items = split_experience_batch(experience)
        size = self._rollout.group_size
        groups = [items[start : start + size] for start in range(0, len(items), size)]
        for index, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
            for item in group:
                item.group_id = f"{self._name}-{step}-{index}"
                item.tags = {"digits": len(prompt) - 2, "maker": self._name}
                item.extras = {"prompt": show(prompt)}
        return groups

    def _put(self, groups: list[list[BufferItem]], stop: Stop) -> int:
        """Put groups, waiting for room while nobody asks to end; returns how many surely are in."""
        stored = 0
        while stored < len(groups) and not stop:
            try:
                stored += len(self._stream.put_many(groups[stored:], timeout=SLICE_S))
            except StoreFull as full:
                stored += full.stored
            except StoreUnavailable as error:
                # to put the rest again might store some twice: make new ones, which waits for Redis
                return stored + error.stored
        return stored


def _new_name() -> str:
    """Return a name that no other maker has: containers repeat host names and process ids."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _seed(seed: int, name: str) -> int:
    """Return a seed of its own for each maker, the same for the same name."""
    return zlib.crc32(f"{seed} {name}".encode())


def _mean_reward(groups: list[list[BufferItem]]) -> float:
    rewards = [float(item.reward) for group in groups for item in group if item.reward is not None]
    return sum(rewards) / max(1, len(rewards))


if __name__ == "__main__":
    sys.exit(main())
