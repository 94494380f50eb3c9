"""`redrb-trainer`: takes full batches, trains PPO on them, acknowledges, publishes the weights.

It starts from the newest published weights; the first trainer of a run makes the warm start.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from redrb.errors import BatchTimeout, ConfigError, LeaseLost, RecordError, RedrbError
from redrb.options import add_options, settings_from
from redrb.telemetry import MetricsLog
from workers.settings import PPOSettings, RunSettings, TrainerSettings
from workers.stopping import Stop
from workers.waiting import wait_in_slices

if TYPE_CHECKING:
    from redrb import Client, Lease
    from workers.policy import ActorCritic


def main(arguments: Sequence[str] | None = None) -> int:
    """Train until the target is reached or it is told to end; returns the exit status."""
    parser = argparse.ArgumentParser(prog="redrb-trainer", description=__doc__)
    add_options(parser, RunSettings, TrainerSettings, PPOSettings)
    options = parser.parse_args(arguments)
    try:
        run = settings_from(options, RunSettings)
        own = settings_from(options, TrainerSettings)
        ppo = settings_from(options, PPOSettings)
    except ConfigError as error:
        print(f"redrb-trainer: {error}", file=sys.stderr)
        return 2
    stop = Stop()
    import redrb

    try:
        with redrb.connect(run.url) as client, MetricsLog(run.metrics, worker=own.worker) as log:
            why = Trainer(client, run, own, ppo, log).work(stop)
            log.write("end", why=why)
    except RedrbError as error:
        print(f"redrb-trainer {own.worker}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print(f"redrb-trainer {own.worker} ends: {why}", file=sys.stderr)
    return 0


class Trainer:
    """Trains the policy on what makers put."""

    def __init__(
        self,
        client: Client,
        run: RunSettings,
        own: TrainerSettings,
        ppo: PPOSettings,
        metrics: MetricsLog,
    ) -> None:
        """Open the task, and publish the warm start unless weights are there already."""
        import torch

        from redrb import ExperienceStream, WeightPublisher
        from workers.ppo import make_optimizer
        from workers.sorting import held_out_prompts

        torch.set_num_threads(run.threads)
        self._own = own
        self._ppo = ppo
        self._metrics = metrics
        self._stream = ExperienceStream(
            client, run.task, namespace=run.namespace, limit=run.limit, lease_ms=own.lease_ms
        )
        self._retry_s = client.retry_s
        self._publisher = WeightPublisher(client, run.weights, namespace=run.namespace)
        self._unpublished = 0
        self._model, self.version = self._begin(client, run)
        self._optimizer = make_optimizer(self._model, ppo)
        self._held_out = held_out_prompts()
        self._started = time.perf_counter()

    def work(self, stop: Stop) -> str:
        """Take, train, acknowledge and publish until an end is reached; returns which.

        Raises:
            BatchTimeout: No full batch came for `idle_timeout` seconds.
            PublisherFenced: Another trainer began to publish under the same name.
        """
        own, step = self._own, 0
        reward = self._evaluate(step)
        with self._stream:
            while (why := self._why_over(stop, step, reward)) is None:
                waiting = time.perf_counter()
                lease = self._take(stop, step, reward)
                if lease is None:
                    continue
                step += 1
                self._train(lease, step, waited_s=time.perf_counter() - waiting)
                self._unpublished += 1
                if self._unpublished >= own.publish_every:
                    self._publish()
                if step % own.evaluate_every == 0:
                    reward = self._evaluate(step)
            self._publish()
            if step % own.evaluate_every:
                self._evaluate(step)
        return why

    def _publish(self) -> None:
        """Publish what was trained since the last version, if anything was."""
        if self._unpublished:
            self.version = self._publisher.publish(self._model).version
            self._unpublished = 0

    def _begin(self, client: Client, run: RunSettings) -> tuple[ActorCritic, int]:
        """Return the newest published policy, or publish a warm start as policy and reference."""
        from redrb import WeightPublisher, WeightSubscriber
        from workers.policy import ActorCritic
        from workers.warm_start import warm_start

        subscriber = WeightSubscriber(client, run.weights, namespace=run.namespace)
        model = ActorCritic()
        found = subscriber.poll(model)
        if found is not None:
            return model, found.version
        model = warm_start(run.seed)
        reference = WeightPublisher(client, f"{run.weights}-reference", namespace=run.namespace)
        reference.publish(model)
        return model, self._publisher.publish(model).version

    def _take(self, stop: Stop, step: int, reward: float) -> Lease | None:
        """Return the next full batch, or None when an end was reached meanwhile."""
        try:
            return wait_in_slices(
                lambda seconds: self._stream.take(self._own.groups, timeout=seconds),
                lambda: self._why_over(stop, step, reward) is not None,
                timeout=self._own.idle_timeout,
                retry_s=self._retry_s,
            )
        except BatchTimeout:
            self._publish()
            raise

    def _train(self, lease: Lease, step: int, *, waited_s: float) -> None:
        """Train on a batch and acknowledge it afterwards; an exception gives it back."""
        from workers.ppo import train_step

        ages = [self.version - made for made in lease.policy_versions if made is not None]
        samples = lease.samples
        started = time.perf_counter()
        try:
            with lease:
                losses = train_step(self._model, self._optimizer, lease.batch(), settings=self._ppo)
        except LeaseLost as error:
            # the step is done and another trainer will repeat it: delivery is at least once
            self._metrics.write("lease_lost", step=step, why=str(error))
            return
        except RecordError as error:
            if not error.ids:
                raise
            # groups that fit into no batch are among the dead letters now, the others went back
            self._metrics.write("misfits", step=step, groups=list(error.ids), why=str(error))
            return
        self._metrics.write(
            "step",
            step=step,
            samples=samples,
            weight_version=self.version,
            staleness_mean=sum(ages) / max(1, len(ages)),
            staleness_max=max(ages, default=0),
            wait_for_batch_s=waited_s,
            step_s=time.perf_counter() - started,
            seconds=time.perf_counter() - self._started,
            **losses,
        )

    def _evaluate(self, step: int) -> float:
        """Return and log the mean reward on held-out prompts."""
        from workers.generation import evaluate

        reward = evaluate(self._model.actor, self._held_out)
        seconds = time.perf_counter() - self._started
        self._metrics.write(
            "evaluation", step=step, reward=reward, weight_version=self.version, seconds=seconds
        )
        return reward

    def _why_over(self, stop: Stop, step: int, reward: float) -> str | None:
        """Return why training ends, None while it goes on."""
        own = self._own
        if stop:
            return f"it was asked to, after {step} steps at weight version {self.version}"
        if reward >= own.target_reward:
            return (
                f"held-out reward {reward:.3f} has reached the target {own.target_reward:g} "
                f"at weight version {self.version}{_advice(step)}"
            )
        if 0 < own.steps <= step:
            return f"{step} steps are done, at weight version {self.version}"
        if 0 < own.max_seconds <= time.perf_counter() - self._started:
            return f"{own.max_seconds:g} seconds are over, at weight version {self.version}"
        return None


def _advice(step: int) -> str:
    """Return what to do where published weights left nothing to train."""
    if step:
        return ""
    return ", before this trainer began: to begin anew, use another --namespace or an empty Redis"


if __name__ == "__main__":
    sys.exit(main())
