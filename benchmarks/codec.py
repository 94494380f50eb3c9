"""What the codec costs, for the shapes that users put: microseconds of processor time a sample.

One thread encodes and decodes, one group a call; decoding goes into the padded batch of a take.
Rounds of all shapes alternate, figures are medians. `memcpy` is the time that copying the raw bytes
of a sample takes in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from redrb.codec import GroupLayout, decode_batch, encode_groups, parse_groups
from redrb.codec.kernels import NAME
from redrb.experience import BufferItem
from redrb.experience.records import named_tensors

Group = list[BufferItem]


@dataclass(frozen=True)
class Case:
    """One shape.

    Attributes:
        groups: What is put, a group a call.
        taken: Groups in the batch that is decoded.
    """

    groups: list[Group]
    taken: int


def rollout(
    generator: torch.Generator, tokens: int, actions: int, *, padding: int = 0
) -> BufferItem:
    """Return a sample of `tokens` token ids, the last `actions` of which are actions."""

    def floats() -> torch.Tensor:
        return torch.randn(actions, generator=generator)

    return BufferItem(
        sequences=torch.randint(0, 32_000, (tokens,), generator=generator),
        action_log_probs=floats(),
        values=floats(),
        reward=torch.randn((), generator=generator),
        kl=floats(),
        advantages=floats(),
        attention_mask=(torch.arange(tokens) >= padding).long(),
        action_mask=torch.ones(actions, dtype=torch.bool),
        policy_version=7,
    )


def ragged(generator: torch.Generator, most: int) -> BufferItem:
    """Return a rollout of 1/4 to all of `most` tokens, three quarters of them actions."""
    tokens = int(torch.randint(most // 4, most + 1, (), generator=generator))
    return rollout(generator, tokens, tokens * 3 // 4)


def transition(generator: torch.Generator) -> BufferItem:
    """Return a step of an environment: 220 bytes."""
    nothing = dict.fromkeys(("sequences", "action_log_probs", "values", "kl", "advantages"))
    return BufferItem(
        **nothing,  # type: ignore[arg-type]
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


def cases() -> dict[str, Case]:
    """Return every shape by name."""
    generator = torch.Generator().manual_seed(0)

    def groups(count: int, size: int, make: Callable[[], BufferItem]) -> list[Group]:
        return [[make() for _ in range(size)] for _ in range(count)]

    equal = groups(32, 1, lambda: rollout(generator, 1024, 768))
    grpo = groups(4, 8, lambda: ragged(generator, 1024))
    extras = {"text": "the answer is 42", "reward": {"format": 1.0, "answer": 0.5}}
    tagged = [
        [
            replace(item, tags={"score": 0.5, "source": "math"}, extras=dict(extras))
            for item in group
        ]
        for group in grpo
    ]
    return {
        "alone, equal": Case(equal, 32),
        "alone, ragged": Case(groups(32, 1, lambda: ragged(generator, 1024)), 32),
        "groups of 8, equal": Case(groups(4, 8, lambda: rollout(generator, 1024, 768)), 4),
        "groups of 8, ragged": Case(grpo, 4),
        "groups of 8, ragged, extras and tags": Case(tagged, 4),
        "transitions, groups of 64": Case(groups(4, 64, lambda: transition(generator)), 4),
        "32k tokens, groups of 4, ragged": Case(groups(2, 4, lambda: ragged(generator, 32_768)), 2),
        "an image of 1.5 MB": Case(groups(8, 1, lambda: pictured(generator)), 8),
    }


def samples_of(case: Case) -> int:
    return sum(map(len, case.groups))


def raw_bytes(case: Case) -> int:
    tensors = (t for group in case.groups for item in group for t in named_tensors(item).values())
    return sum(tensor.nbytes for tensor in tensors)


def calls(case: Case) -> dict[str, Callable[[], object]]:
    """Return what is timed."""
    blobs = [encode_groups([group])[0].blob for group in case.groups]
    source = torch.zeros(raw_bytes(case), dtype=torch.uint8)
    target = torch.empty_like(source)

    def decode() -> None:
        decode_batch([layout for layout in parse_groups(blobs) if isinstance(layout, GroupLayout)])

    return {
        "encode": lambda: [encode_groups([group]) for group in case.groups],
        "decode": decode,
        "memcpy": lambda: target.copy_(source),
    }


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Return the figures of each case by name."""
    known = cases()
    timed = {name: calls(case) for name, case in known.items()}
    times: dict[str, dict[str, list[float]]] = {
        name: {what: [] for what in ("encode", "decode", "memcpy")} for name in known
    }
    for _ in range(rounds):
        for name, case in known.items():
            for what, call in timed[name].items():
                start = time.process_time_ns()
                call()
                spent = time.process_time_ns() - start
                times[name][what].append(spent / 1000 / samples_of(case))
    return {
        name: {
            "raw_bytes": raw_bytes(case) / samples_of(case),
            "stored_bytes": sum(len(encode_groups([group])[0].blob) for group in case.groups)
            / samples_of(case),
            **{what: statistics.median(spent) for what, spent in times[name].items()},
        }
        for name, case in known.items()
    }


def main() -> None:
    """Print a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(options.rounds)
    if options.json:
        print(json.dumps({"codec": NAME, "microseconds_a_sample": figures}))
        return
    print(f"codec: {NAME}; microseconds a sample")
    print(f"{'':38}{'raw bytes':>12}{'stored':>12}{'encode':>10}{'decode':>10}{'memcpy':>10}")
    for name, shown in figures.items():
        sizes = f"{shown['raw_bytes']:12,.0f}{shown['stored_bytes']:12,.0f}"
        print(
            f"{name:38}{sizes}{shown['encode']:10.1f}{shown['decode']:10.1f}{shown['memcpy']:10.1f}"
        )


if __name__ == "__main__":
    main()
