"""`Trainer`: the hooks of a training on a stream, without the adapters of other libraries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from redrb import BufferItem, Client, Experience, ExperienceStream, WeightSubscriber
from redrb.train import Stateful
from redrb.train.fresh_batches import FitEnded
from redrb.train.trainer import Trainer
from tests.samples import numbered


class Summing(Trainer):
    """Adds up rewards; passes over batches whose first reward is odd."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.kept = nn.Linear(1, 1, bias=False)
        self.other = nn.Linear(1, 1)  # is not in checkpoints
        nn.init.zeros_(self.kept.weight)
        super().__init__(*args, device="cpu", timeout=20, **options)

    def next_batch(self) -> Experience:
        while True:
            batch = super().next_batch()
            if float(batch.reward[0]) % 2 == 0:  # type: ignore[index]
                return batch

    def training_step(self, experience: Experience) -> Mapping[str, Any]:
        with torch.no_grad():
            self.kept.weight += experience.reward.sum()  # type: ignore[union-attr]
        return {}

    def send_weights(self) -> None:
        self.push_weights({"sum": self.kept})

    def checkpointed(self) -> Mapping[str, Stateful]:
        return {"sum": self.kept}


def groups(*rewards: int) -> list[list[BufferItem]]:
    return [[numbered(reward)] for reward in rewards]


def test_a_trainer_needs_a_stream_and_a_batch_size(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    def trainer() -> Summing:
        stream = ExperienceStream(client, "sums", namespace=namespace)
        return Summing(client, stream, 2, name="adder", checkpoint_dir=tmp_path)

    maker = ExperienceStream(client, "sums", namespace=namespace)
    with trainer() as first, maker:
        maker.put_many(groups(0, 1, 3, 3, 2, 2, 4, 4))
        first.fit(1, 1)
        first.fit(1, 1)
        with pytest.raises(FitEnded):  # outside of `fit` there is none
            first.next_batch()
        assert (first.weight_version, float(first.kept.weight.detach())) == (2, 5.0)
        ledger = maker.stats().ledger  # a batch that was passed over is acknowledged with the step
        assert (ledger.acked, ledger.leased, ledger.waiting) == (6, 0, 2)
        found = WeightSubscriber(client, "adder", namespace=namespace).fetch()
        assert float(found["sum.weight"]) == 5.0
    with trainer() as second:
        assert second.resume()
        for _ in range(3):  # two calls of `fit` were done
            second.fit(1, 1)
        assert float(second.kept.weight.detach()) == 13.0
