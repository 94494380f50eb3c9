"""Workloads of the benchmarks: samples as makers produce them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from redrb import BufferItem
from redrb.experience.records import named_tensors


@dataclass(frozen=True)
class Workload:
    """Groups of one sample.

    Attributes:
        name: Its name for `--workload`.
        sequence: S, tokens of a sample.
        actions: A, actions of a sample.
        batch: Groups a put and groups a take.
    """

    name: str
    sequence: int
    actions: int
    batch: int

    def items(self, count: int, seed: int = 0) -> list[BufferItem]:
        """Return `count` samples, each a left-padded prompt and a completion."""
        generator = torch.Generator().manual_seed(seed)
        return [self._item(generator) for _ in range(count)]

    def _item(self, generator: torch.Generator) -> BufferItem:
        prompt = self.sequence - self.actions
        padding = int(torch.randint(0, prompt // 2, (), generator=generator))
        tokens = torch.randint(1, 32_000, (self.sequence,), generator=generator)
        tokens[:padding] = 0
        floats = torch.randn(4, self.actions, generator=generator)
        return BufferItem(
            sequences=tokens,
            action_log_probs=floats[0].clone(),
            values=floats[1].clone(),
            reward=torch.randn((), generator=generator),
            kl=floats[2].clone(),
            advantages=floats[3].clone(),
            attention_mask=(torch.arange(self.sequence) >= padding).long(),
            action_mask=torch.ones(self.actions, dtype=torch.bool),
            policy_version=1,
        )


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("rlhf-1k", sequence=1024, actions=768, batch=32),
        Workload("short", sequence=192, actions=128, batch=32),
        Workload("long-8k", sequence=8192, actions=6144, batch=8),
    )
}


def raw_bytes(item: BufferItem) -> bytes:
    """Return all tensors of a sample as they lie in memory, one after the other."""
    return b"".join(tensor.numpy().tobytes() for tensor in named_tensors(item).values())
