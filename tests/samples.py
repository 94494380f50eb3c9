"""Samples for tests: random ones of every shape, and tiny ones that carry a number."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch

from redrb import BufferItem, Experience
from redrb.experience.records import TENSOR_FIELDS
from redrb.stream.take.lease import PartsLease


def numbered(number: int, **changes: Any) -> BufferItem:
    """Return a tiny sample whose reward is `number`."""
    fields: dict[str, Any] = {
        "sequences": torch.tensor([1, 2, 3]),
        "action_log_probs": torch.tensor([-0.5, -0.25]),
        "values": torch.tensor(0.5),
        "reward": torch.tensor(float(number)),
        "kl": torch.tensor(0.0),
        "advantages": torch.tensor(1.0),
    }
    return BufferItem(**{**fields, **changes})


def numbers(records: PartsLease[Any] | Iterable[BufferItem]) -> list[int]:
    """Return the numbers of the samples in a lease or a list."""
    items = records.items() if isinstance(records, PartsLease) else records
    return [int(item.reward) for item in items if item.reward is not None]


def random_item(dice: random.Random, *, scalars: bool = False, masks: bool = True) -> BufferItem:
    """Return a sample of random lengths: S of 2 to 40, A of 1 to S - 1.

    Args:
        dice: Where randomness comes from.
        scalars: `values`, `kl` and `advantages` are scalars instead of [A].
        masks: Give both masks; the first action may be masked, as in multi-turn samples.
    """
    generator = torch.Generator().manual_seed(dice.randrange(2**31))
    length = dice.randint(2, 40)
    actions = dice.randint(1, length - 1)
    shape = () if scalars else (actions,)
    action_mask = torch.ones(actions, dtype=torch.bool)
    action_mask[: dice.randint(0, actions - 1)] = False

    def floats(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    return BufferItem(
        sequences=torch.randint(1, 50_000, (length,), generator=generator),
        action_log_probs=-floats(actions).abs(),
        values=floats(*shape),
        reward=floats(),
        kl=floats(*shape),
        advantages=floats(*shape),
        attention_mask=torch.ones(length, dtype=torch.int64) if masks else None,
        action_mask=action_mask if masks else None,
        policy_version=dice.randrange(100),
        tags={"score": dice.random()},
        extras={"text": "x" * dice.randrange(20)},
    )


def assert_same(got: BufferItem | Experience, expected: BufferItem | Experience) -> None:
    """Compare two records bit for bit, dtypes and metadata included."""
    for name in TENSOR_FIELDS:
        _assert_same_tensor(name, getattr(got, name), getattr(expected, name))
    assert got.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        _assert_same_tensor(name, got.tensors[name], tensor)
    for name in ("policy_version", "status", "group_id", "tags", "extras"):
        assert getattr(got, name) == getattr(expected, name), name


def _assert_same_tensor(name: str, got: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    if expected is None or got is None:
        assert got is None, name
        assert expected is None, name
        return
    assert got.dtype == expected.dtype, name
    assert got.shape == expected.shape, name
    assert torch.equal(got, expected), name
