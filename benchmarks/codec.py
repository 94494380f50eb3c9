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

from benchmarks.shapes import MakeSample, group_bytes, padded, pictured, ragged, transition
from redrb.codec import GroupLayout, decode_batch, encode_groups, parse_groups
from redrb.codec.kernels import NAME
from redrb.experience import BufferItem

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


def cases() -> dict[str, Case]:
    """Return every shape by name."""
    generator = torch.Generator().manual_seed(0)

    def groups(count: int, size: int, make: MakeSample) -> list[Group]:
        return [[make(generator) for _ in range(size)] for _ in range(count)]

    equal, uneven = padded(1024), ragged(256, 1024)
    grpo = groups(4, 8, uneven)
    extras = {"text": "the answer is 42", "reward": {"format": 1.0, "answer": 0.5}}
    tagged = [
        [
            replace(item, tags={"score": 0.5, "source": "math"}, extras=dict(extras))
            for item in group
        ]
        for group in grpo
    ]
    return {
        "alone, equal": Case(groups(32, 1, equal), 32),
        "alone, ragged": Case(groups(32, 1, uneven), 32),
        "groups of 8, equal": Case(groups(4, 8, equal), 4),
        "groups of 8, ragged": Case(grpo, 4),
        "groups of 8, ragged, extras and tags": Case(tagged, 4),
        "transitions, groups of 64": Case(groups(4, 64, transition), 4),
        "32k tokens, groups of 4, ragged": Case(groups(2, 4, ragged(8_192, 32_768)), 2),
        "an image of 1.5 MB": Case(groups(8, 1, pictured), 8),
    }


def samples_of(case: Case) -> int:
    return sum(map(len, case.groups))


def raw_bytes(case: Case) -> int:
    return sum(map(group_bytes, case.groups))


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
