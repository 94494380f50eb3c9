"""`redrb-maker`: samples completions with the newest weights, scores them, puts them into the task.

Any number of makers may run; one may start late, end or die at any time.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from redrb.errors import RedrbError, StoreFull
from redrb.options import add_options, settings_from
from redrb.telemetry import MetricsLog
from workers.settings import MakerSettings, RolloutSettings, RunSettings
from workers.stopping import Stop

if TYPE_CHECKING:
    from redrb import BufferItem, Client, WeightSubscriber
    from workers.policy import ActorCritic

PUT_SLICE_S = 1.0
"""Longest wait for room before a maker looks whether it was asked to end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a maker until it is told to end; returns the exit status."""
    parser = argparse.ArgumentParser(prog="redrb-maker", description=__doc__)
    add_options(parser, RunSettings, MakerSettings, RolloutSettings)
    options = parser.parse_args(arguments)
    run = settings_from(options, RunSettings)
    own = settings_from(options, MakerSettings)
    name = own.worker or f"{socket.gethostname()}-{os.getpid()}"
    stop = Stop()
    import redrb

    try:
        with redrb.connect(run.url) as client, MetricsLog(run.metrics, worker=name) as metrics:
            Maker(client, name, run, own, settings_from(options, RolloutSettings), metrics).work(
                stop
            )
    except RedrbError as error:
        print(f"redrb-maker {name}: {error}", file=sys.stderr)
        return 1
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
        """Open the task and wait for the first weights.

        Raises:
            WeightTimeout: No trainer published any in time.
        """
        import torch

        from redrb import ExperienceStream, WeightSubscriber

        torch.set_num_threads(run.threads)
        self._name = name
        self._own = own
        self._rollout = rollout
        self._metrics = metrics
        self._stream = ExperienceStream(client, run.task, namespace=run.namespace, limit=run.limit)
        self._generator = torch.Generator().manual_seed(_seed(run.seed, name))
        timeout = own.weights_timeout
        reference = WeightSubscriber(client, f"{run.weights}-reference", namespace=run.namespace)
        self._reference = _first(reference, timeout)
        self._subscriber = WeightSubscriber(client, run.weights, namespace=run.namespace)
        self._policy = _first(self._subscriber, timeout)

    def work(self, stop: Stop) -> None:
        """Make groups and put them, with the newest weights each time, until told to end."""
        step = 0
        with self._stream:
            while not stop and (self._own.steps == 0 or step < self._own.steps):
                step += 1
                self._subscriber.poll(self._policy)
                started = time.perf_counter()
                groups = self._make(step)
                made = time.perf_counter()
                self._put(groups, stop)
                self._metrics.write(
                    "put",
                    step=step,
                    groups=len(groups),
                    samples=sum(map(len, groups)),
                    policy_version=self._subscriber.version,
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
            policy_version=self._subscriber.version,
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

    def _put(self, groups: list[list[BufferItem]], stop: Stop) -> None:
        """Put groups, waiting for room as long as nobody asks to end."""
        while groups and not stop:
            try:
                self._stream.put_many(groups, timeout=PUT_SLICE_S)
                return
            except StoreFull as full:
                groups = groups[full.stored :]


def _first(subscriber: WeightSubscriber, timeout: float) -> ActorCritic:
    """Return a model with the newest weights, waiting for the first ones."""
    from workers.policy import ActorCritic

    subscriber.wait(newer_than=0, timeout=timeout)
    model = ActorCritic()
    subscriber.poll(model)
    return model


def _seed(seed: int, name: str) -> int:
    """Return a seed of its own for each maker, the same for the same name."""
    return zlib.crc32(f"{seed} {name}".encode())


def _mean_reward(groups: list[list[BufferItem]]) -> float:
    rewards = [float(item.reward) for group in groups for item in group if item.reward is not None]
    return sum(rewards) / max(1, len(rewards))


if __name__ == "__main__":
    sys.exit(main())
