"""What trainers wait for data, and makers for sending, when makers are fast enough.

A trainer whose step takes `--step-ms` trains what `--makers` processes make, together faster than
it trains by `--surplus`. Steps and making are pauses, as work on accelerators is for the CPU; all
else is real: the server, processes, samples of 29.4 KB, weights after every tenth step. There is no
limit, so that makers never wait for the trainer.

`trainer_wait_share` is the share of the trainer's time for which it waited for data, from its first
batch on; `maker_send_share` the share of the makers' time for which sending held them up.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
import uuid
from multiprocessing.queues import Queue
from typing import Any

import torch
from torch import nn

import redrb
from benchmarks.server import private_server
from benchmarks.shapes import SHAPES

TIMEOUT_S = 60
UPDATE_STEPS = 10
BATCH = 32


class Timed(redrb.MakerCallback):
    """Measures the time for which sending blocks a maker, and the time of all its steps."""

    def __init__(self) -> None:
        self.send_s, self._since = 0.0, 0.0
        self.began = self.ended = time.perf_counter()

    def on_loop_start(self) -> None:
        self.began = time.perf_counter()

    def on_send_start(self) -> None:
        self._since = time.perf_counter()

    def on_send_end(self) -> None:
        self.send_s += time.perf_counter() - self._since

    def on_batch_end(self) -> None:
        self.ended = time.perf_counter()


class PausingMaker:
    """Returns the same batch again and again, each time after a fixed pause."""

    def __init__(self, make_s: float) -> None:
        groups = SHAPES["rlhf-1k"].items(BATCH)
        self._batch = redrb.make_experience_batch([item for group in groups for item in group])
        self._make_s = make_s

    def make_experience(self, inputs: Any, **generate_kwargs: Any) -> redrb.Experience:
        time.sleep(self._make_s)
        self._batch.policy_version = None
        return self._batch


class Holder(redrb.ExperienceMakerHolder):
    def __init__(self, make_s: float, **options: Any) -> None:
        self._maker = PausingMaker(make_s)
        super().__init__(
            ["trainer_0"],
            lambda: redrb.Strategy("cpu"),
            lambda: (nn.Linear(256, 256), None, None, None),
            sync_models_from_trainers=True,
            **options,
        )

    def build_experience_maker(self, *models: Any) -> PausingMaker:
        return self._maker


class Trainer(redrb.DetachedTrainer):
    """Pauses for a step, and notes how long it waited from its first batch on."""

    def __init__(self, step_s: float, **options: Any) -> None:
        self.actor = nn.Linear(256, 256)
        self.step_s = step_s
        self.samples = 0
        self.began = self.waited_s = 0.0
        super().__init__([], **options)

    def training_step(self, experience: redrb.Experience) -> dict[str, float]:
        if not self.began:
            self.began, self.waited_s = time.perf_counter(), -self.wait_for_batch_s
        time.sleep(self.step_s)
        self.samples += len(experience)
        return {}

    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:
        self.push_weights({"actor": self.actor}, fully_update=fully_update)


def make(url: str, namespace: str, number: int, make_s: float, figures: Queue[Any]) -> None:
    """Make until SIGTERM comes."""
    torch.set_num_threads(1)
    timed = Timed()
    with Holder(
        make_s,
        callbacks=[timed],
        name=f"maker-{number}",
        client=url,
        namespace=namespace,
        stop_timeout=1.0,
    ) as maker:
        maker.workingloop(lambda: iter(lambda: torch.zeros(1, 1), None))
    figures.put((timed.send_s, timed.ended - timed.began))


def measure(
    url: str, *, steps: int, step_s: float, makers: int, surplus: float
) -> dict[str, float]:
    """Return the shares, and samples a second from the first batch on."""
    context = multiprocessing.get_context("spawn")
    figures = context.Queue()
    namespace = uuid.uuid4().hex
    make_s = makers * step_s / (1 + surplus)
    processes = [
        context.Process(target=make, args=(url, namespace, number, make_s, figures))
        for number in range(makers)
    ]
    options: dict[str, Any] = {"client": url, "namespace": namespace, "timeout": TIMEOUT_S}
    with Trainer(step_s, train_batch_size=BATCH, device="cpu", **options) as trainer:
        for process in processes:
            process.start()
        trainer.sync_models_to_remote_makers()
        try:
            trainer.fit(steps, UPDATE_STEPS)
            seconds = time.perf_counter() - trainer.began
        finally:
            for process in processes:
                process.terminate()
        times = [figures.get(timeout=TIMEOUT_S) for _ in processes]
        for process in processes:
            process.join(TIMEOUT_S)
    return {
        "trainer_wait_share": (trainer.wait_for_batch_s + trainer.waited_s) / seconds,
        "maker_send_share": sum(send for send, _ in times) / sum(whole for _, whole in times),
        "samples_per_second": trainer.samples / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="steps a round")
    parser.add_argument("--step-ms", type=float, default=40.0, help="time of a step")
    parser.add_argument("--makers", type=int, default=2, help="maker processes")
    parser.add_argument(
        "--surplus", type=float, default=0.25, help="share by which makers are ahead"
    )
    parser.add_argument("--server", help="path of a redis-server; default: the one on PATH")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds: list[dict[str, float]] = []
    with private_server(options.server) as server:
        print(f"{options.makers} makers, {server.name}")
        for number in range(1, options.rounds + 1):
            rounds.append(
                measure(
                    server.url,
                    steps=options.steps,
                    step_s=options.step_ms / 1000,
                    makers=options.makers,
                    surplus=options.surplus,
                )
            )
            shown = "  ".join(f"{name} {value:.4g}" for name, value in rounds[-1].items())
            print(f"round {number}: {shown}", flush=True)
    result = {
        name: round(statistics.median(figures[name] for figures in rounds), 4) for name in rounds[0]
    }
    print(
        f"the trainer waited {result['trainer_wait_share']:.1%} of its time for data, sending held "
        f"makers up for {result['maker_send_share']:.1%} of theirs, at "
        f"{result['samples_per_second']:.0f} samples/s"
    )
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
