"""Makers join and are killed while a trainer trains: it never pauses, and nothing is lost."""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from itertools import pairwise
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from torch import nn

import redrb
from tests.audit import audit
from tests.faults.elastic_makers import GROUPS, make

CHANGES = 10
AT_ONCE = 3
MOST_PAUSE_S = 12.0
"""Bound on a gap between steps. A wake-up that a killed maker took along would cost LOOK_AGAIN_S of
`only_wakes`, a lease that it held thirty seconds."""


class Trainer(redrb.DetachedTrainer):
    """Notes when it trained which groups."""

    def __init__(self, **options: Any) -> None:
        self.actor = nn.Linear(2, 2)
        self.times: list[float] = []
        self.trained: list[str] = []
        super().__init__([], train_batch_size=GROUPS, device="cpu", timeout=30, **options)

    def training_step(self, experience: redrb.Experience) -> dict[str, Any]:
        self.times.append(time.monotonic())
        self.trained += sorted(set(map(str, experience.group_id or ())))
        return {}

    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:
        self.push_weights({"actor": self.actor}, fully_update=fully_update)


@pytest.mark.slow
def test_makers_come_and_go_and_the_trainer_never_pauses(
    real_url: str, namespace: str, only_wakes: None
) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.elastic_makers"])
    makers: list[BaseProcess] = []

    def join() -> None:
        name = f"maker-{len(makers)}"
        makers.append(context.Process(target=make, args=(real_url, namespace, name)))
        makers[-1].start()

    def change(trainer: Trainer) -> None:
        for number in range(CHANGES):
            join()
            time.sleep(0.4)  # a part of a batch later each time
            makers[number].kill()
            time.sleep(0.03 * number)
        for maker in makers[CHANGES:]:
            maker.terminate()
        for maker in makers:
            maker.join(20)
        trainer.stop("no more makers")

    class AtFirst(redrb.TrainerCallback):
        def on_batch_start(self) -> None:
            if len(trainer.times) == AT_ONCE:
                changes.start()

    try:
        with (
            redrb.connect(real_url) as client,
            Trainer(client=client, namespace=namespace, callbacks=[AtFirst()]) as trainer,
        ):
            for _ in range(AT_ONCE):
                join()
            trainer.sync_models_to_remote_makers()
            changes = threading.Thread(target=change, args=(trainer,))
            trainer.fit(None, 5)
            changes.join(20)
            ended = [maker.exitcode for maker in makers]
            assert ended == [-9] * CHANGES + [0] * AT_ONCE
            while len(
                trainer.buffer.stream
            ):  # the last samples are no full batch, or were requeued
                with trainer.buffer.stream.take(GROUPS, timeout=5, at_least=1) as lease:
                    trainer.trained += sorted({str(item.group_id) for item in lease.items()})
            gaps = [after - before for before, after in pairwise(trainer.times)]
            ledger = trainer.buffer.stream.stats().ledger
            print(f"{len(gaps)} gaps, median {statistics.median(gaps):.3f} s, most {max(gaps):.3f}")
            assert max(gaps) < MOST_PAUSE_S
            # each group that was put was trained, and none of them twice
            assert len(trainer.trained) == len(set(trainer.trained)) == ledger.put == ledger.acked
            assert {name.split("/")[0] for name in trainer.trained} > {"maker-0", "maker-9"}
            assert ledger.balanced
            audit(trainer.buffer.stream)
    finally:
        for maker in makers:
            maker.kill()
            maker.join(10)
