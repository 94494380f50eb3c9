"""The shapes of experience that the benchmarks put and take, from the same tensors everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from redrb import BufferItem
from redrb.experience.records import named_tensors

MakeSample = Callable[[torch.Generator], BufferItem]


@dataclass(frozen=True)
class Shape:
    """One shape: how large a sample is, and how many go together.

    Attributes:
        name: Its name on the command line and in the results.
        summary: One line that says what users put in this shape.
        make: Makes one sample.
        take_groups: Groups a take.
        round_groups: Groups of a round of size 1, a multiple of `put_groups` and `take_groups`.
        distinct_groups: Distinct groups that a producer puts again and again, likewise.
        group_samples: Samples a group.
        put_groups: Groups a put.
        lengths_vary: Whether a batch needs padding.
    """

    name: str
    summary: str
    make: MakeSample
    take_groups: int
    round_groups: int
    distinct_groups: int
    group_samples: int = 1
    put_groups: int = 1
    lengths_vary: bool = False

    @property
    def put_samples(self) -> int:
        """Samples a put."""
        return self.put_groups * self.group_samples

    @property
    def take_samples(self) -> int:
        """Samples a take."""
        return self.take_groups * self.group_samples

    @property
    def one_at_a_time(self) -> bool:
        """Whether a put is one sample, and its maker waits until it is stored."""
        return self.put_samples == 1

    def items(self, groups: int) -> list[list[BufferItem]]:
        """Return so many distinct groups, the same ones in every process.

        Policy versions arrive out of order, from 1 to 8, each for `put_groups` groups.
        """
        generator = torch.Generator().manual_seed(0)
        return [
            [
                replace(self.make(generator), policy_version=1 + index // self.put_groups * 5 % 8)
                for _ in range(self.group_samples)
            ]
            for index in range(groups)
        ]


def rollout(
    generator: torch.Generator, tokens: int, actions: int, *, padding: int = 0
) -> BufferItem:
    """Return a sample of `tokens` token ids, the last `actions` of which are actions."""
    ids = torch.randint(1, 32_000, (tokens,), generator=generator)
    ids[:padding] = 0
    return BufferItem(
        sequences=ids,
        action_log_probs=torch.randn(actions, generator=generator),
        values=torch.randn(actions, generator=generator),
        reward=torch.randn((), generator=generator),
        kl=torch.randn(actions, generator=generator),
        advantages=torch.randn(actions, generator=generator),
        attention_mask=(torch.arange(tokens) >= padding).long(),
        action_mask=torch.ones(actions, dtype=torch.bool),
        policy_version=7,
    )


def padded(tokens: int) -> MakeSample:
    """Make rollouts of equal lengths with a left-padded prompt of a quarter of the tokens."""

    def make(generator: torch.Generator) -> BufferItem:
        padding = int(torch.randint(0, tokens // 8, (), generator=generator))
        return rollout(generator, tokens, tokens * 3 // 4, padding=padding)

    return make


def ragged(least: int, most: int) -> MakeSample:
    """Make rollouts of `least` to `most` tokens, three quarters of them actions."""

    def make(generator: torch.Generator) -> BufferItem:
        tokens = int(torch.randint(least, most + 1, (), generator=generator))
        return rollout(generator, tokens, tokens * 3 // 4)

    return make


def transition(generator: torch.Generator) -> BufferItem:
    """Return a step of an environment: about 220 bytes."""
    return BufferItem(
        sequences=None,
        action_log_probs=None,
        reward=torch.randn((), generator=generator),
        tensors={
            "observation": torch.randn(24, generator=generator),
            "next_observation": torch.randn(24, generator=generator),
            "action": torch.randint(0, 6, (), generator=generator),
            "done": torch.zeros((), dtype=torch.bool),
        },
        policy_version=7,
    )


def pictured(generator: torch.Generator) -> BufferItem:
    """Return a rollout with an image of 1.5 MB."""
    pixels = torch.randint(0, 256, (3, 700, 700), dtype=torch.uint8, generator=generator)
    return replace(rollout(generator, 1024, 768), tensors={"pixels": pixels})


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "rlhf-1k",
            "PPO: 1,024 tokens, all lengths equal; 32 samples a put",
            make=padded(1024),
            put_groups=32,
            take_groups=32,
            round_groups=16_384,
            distinct_groups=256,
        ),
        Shape(
            "ragged",
            "64 to 4,096 tokens; 32 samples a put",
            make=ragged(64, 4096),
            put_groups=32,
            take_groups=32,
            round_groups=8_192,
            distinct_groups=128,
            lengths_vary=True,
        ),
        Shape(
            "grpo",
            "groups of 8 completions of 256 to 1,024 tokens; a group a put",
            make=ragged(256, 1024),
            group_samples=8,
            take_groups=4,
            round_groups=3_072,
            distinct_groups=32,
            lengths_vary=True,
        ),
        Shape(
            "agent",
            "256 tokens; each completion is put by itself as it finishes",
            make=padded(256),
            take_groups=32,
            round_groups=4_096,
            distinct_groups=256,
        ),
        Shape(
            "tiny",
            "transitions of 205 bytes; groups of 64, a group a put",
            make=transition,
            group_samples=64,
            take_groups=4,
            round_groups=2_048,
            distinct_groups=32,
        ),
        Shape(
            "long",
            "groups of 4 of 8,192 to 32,768 tokens; a group a put",
            make=ragged(8_192, 32_768),
            group_samples=4,
            take_groups=2,
            round_groups=192,
            distinct_groups=8,
            lengths_vary=True,
        ),
        Shape(
            "vision",
            "1.5 MB of pixels beside 1,024 tokens; 8 samples a put",
            make=pictured,
            put_groups=8,
            take_groups=8,
            round_groups=512,
            distinct_groups=32,
        ),
    )
}


def group_bytes(group: list[BufferItem]) -> int:
    """Return the bytes of all tensors of a group as they lie in memory."""
    return sum(tensor.nbytes for item in group for tensor in named_tensors(item).values())
