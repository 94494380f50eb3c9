"""Turns that all ranks of a sharded model sample together, in the order of the first rank.

A sharded model computes on all ranks at the same time, with the same inputs. Episodes run on the
first rank only: the time of a tool decides which turns are one batch, and differs between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from redrb.recipe.turns import Turn
from redrb.runtime.world import group_device


def send_turns(turns: Sequence[Turn]) -> None:
    """Send a batch to the other ranks, which call `received_turns`; an empty one is the end."""
    numbers: list[int] = []
    for turn in turns:
        numbers += [turn.max_new_tokens, len(turn.stop), len(turn.tokens), *turn.stop, *turn.tokens]
    _broadcast(torch.tensor([len(numbers)], dtype=torch.int64))
    if numbers:
        _broadcast(torch.tensor(numbers, dtype=torch.int64))


def received_turns() -> list[Turn]:
    """Return the next batch of the first rank; empty at the end."""
    count = int(_broadcast(torch.zeros(1, dtype=torch.int64)))
    if not count:
        return []
    numbers = _broadcast(torch.zeros(count, dtype=torch.int64)).tolist()
    turns, at = [], 0
    while at < count:
        most, stops, length = numbers[at : at + 3]
        first = at + 3 + stops
        turns.append(Turn(numbers[first : first + length], most, tuple(numbers[at + 3 : first])))
        at = first + length
    return turns


def _broadcast(tensor: Tensor) -> Tensor:
    tensor = tensor.to(group_device())
    distributed.broadcast(tensor, 0)
    return tensor
