"""Deltas for the benchmark of weights: their size on a trained model, and the codec's speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import zstandard
from torch import Tensor

import redrb
from benchmarks.weights_state import Training
from redrb.weights.wire.delta import Bytes, Run
from redrb.weights.wire.delta_decoding import apply_block
from redrb.weights.wire.delta_encoding import encode_block
from redrb.weights.wire.layout import CHUNK_BYTES

RATES = ("1e-6", "3e-6", "1e-5")


@dataclass(frozen=True)
class Sizes:
    """Bytes after one step each.

    Attributes:
        nbytes: Of a full version.
        deltas: Of the delta, by the step's learning rate.
        changed: Share of elements that changed, by learning rate.
        xor: XOR of both states with zstd level 1, at 1e-6.
        states: Both, at 1e-6.
    """

    nbytes: int
    deltas: dict[str, int]
    changed: dict[str, float]
    xor: int
    states: tuple[Bytes, Bytes]


def measure_sizes(client: redrb.Client, training: Training) -> Sizes:
    """Make a step at each rate, and publish before and after."""
    publisher = redrb.WeightPublisher(client, "trained", dtype="bfloat16")
    deltas: dict[str, int] = {}
    changed: dict[str, float] = {}
    states: dict[str, tuple[Bytes, Bytes]] = {}
    for rate in RATES:
        publisher.publish(training.model)
        before = _published(training)
        training.step(float(rate))
        version = publisher.publish(training.model)
        if version.delta_bytes is None:
            raise SystemExit("no delta was published")
        after = _published(training)
        deltas[rate], changed[rate] = version.delta_bytes, float(np.mean(before != after))
        states[rate] = (before.view(np.uint8), after.view(np.uint8))
    first, second = states[RATES[0]]
    xor = len(zstandard.ZstdCompressor(level=1).compress((first ^ second).data))
    return Sizes(version.nbytes, deltas, changed, xor, (first, second))


def measure_codec(states: tuple[Bytes, Bytes], nbytes: int, rounds: int) -> tuple[float, float]:
    """Return GB of state a second that are encoded and applied, by one thread.

    Args:
        states: Before and after, repeated until there are `nbytes` of each.
        nbytes: Of a state.
        rounds: Passes; medians are taken.
    """
    old, new = (np.resize(state, nbytes // 2 * 2) for state in states)
    places = [slice(at, at + CHUNK_BYTES) for at in range(0, old.size, CHUNK_BYTES)]
    runs = [[Run(0, old[place].size, 2)] for place in places]
    there = [encode_block(old[p], new[p], run) for p, run in zip(places, runs, strict=True)]
    back = [encode_block(new[p], old[p], run) for p, run in zip(places, runs, strict=True)]
    state = old.copy()

    def encode() -> None:
        for place, run in zip(places, runs, strict=True):
            encode_block(old[place], new[place], run)

    def apply(blocks: list[bytes]) -> None:
        for place, run, block in zip(places, runs, blocks, strict=True):
            apply_block(state[place], block, run)

    encoding: list[float] = []
    applying: list[float] = []
    for _ in range(rounds):
        encoding.append(_timed(encode))
        applying.append(_timed(lambda: apply(there)))
        if not np.array_equal(state, new):
            raise SystemExit("a delta did not lead to the new state")
        applying.append(_timed(lambda: apply(back)))
    gigabytes = old.size / 1e9
    return gigabytes / statistics.median(encoding), gigabytes / statistics.median(applying)


def _published(training: Training) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    """Return the published state of the model: its parameters as bfloat16."""
    parts: list[Tensor] = [
        tensor.detach().to(torch.bfloat16).view(-1) for tensor in training.model.parameters()
    ]
    return torch.cat(parts).view(torch.int16).numpy()


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
