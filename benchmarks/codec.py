"""Time the codec on `rlhf-1k`: `python -m benchmarks.codec`; us a sample, best, median.

The same calls are timed in turn, round by round, so that noise of the machine meets all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from redrb.codec import (
    GroupLayout,
    decode_batch,
    decode_items,
    encode_experience,
    encode_groups,
    parse_group,
    parse_groups,
)
from redrb.experience import BufferItem, make_experience_batch
from redrb.experience.records import named_tensors


def make_item(generator: torch.Generator, tokens: int = 1024, actions: int = 768) -> BufferItem:
    """Return one sample of RLHF: a left-padded prompt, its completion and all eight fields."""
    padding = int(torch.randint(20, 200, (), generator=generator))
    sequences = torch.randint(1, 32_000, (tokens,), generator=generator)
    sequences[:padding] = 0

    def floats() -> torch.Tensor:
        return torch.randn(actions, generator=generator)

    return BufferItem(
        sequences=sequences,
        action_log_probs=floats(),
        values=floats(),
        reward=torch.randn((), generator=generator),
        kl=floats(),
        advantages=floats(),
        attention_mask=(torch.arange(tokens) >= padding).long(),
        action_mask=torch.ones(actions, dtype=torch.bool),
        policy_version=7,
    )


def parse(blobs: list[bytes]) -> list[GroupLayout]:
    """Return the layouts of blobs that are all good."""
    return [layout for layout in parse_groups(blobs) if isinstance(layout, GroupLayout)]


def main() -> None:
    """Print the times of every call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    items = [make_item(generator) for _ in range(options.groups)]
    groups = [[item] for item in items]
    batch = make_experience_batch(items)
    blobs = [b"".join(group.parts) for group in encode_groups(groups)]
    layouts = parse(blobs)
    raw = sum(tensor.nbytes for tensor in named_tensors(items[0]).values())
    print(f"{raw} bytes a sample, {sum(map(len, blobs)) / len(blobs):.0f} as a blob")
    calls: dict[str, Callable[[], object]] = {
        "encode_groups": lambda: encode_groups(groups),
        "encode_experience": lambda: encode_experience(batch),
        "join": lambda: [b"".join(group.parts) for group in encode_experience(batch)],
        "parse_group": lambda: [parse_group(blob) for blob in blobs],
        "parse_groups": lambda: parse_groups(blobs),
        "decode_batch": lambda: decode_batch(layouts),
        "parse + decode_batch": lambda: decode_batch(parse(blobs)),
        "decode_items": lambda: [decode_items(layout) for layout in layouts],
        "make_experience_batch": lambda: make_experience_batch(items),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(options.rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) / options.groups * 1e6)
    for name, each in times.items():
        print(f"{name:24} {min(each):7.2f} {statistics.median(each):7.2f}")


if __name__ == "__main__":
    main()
