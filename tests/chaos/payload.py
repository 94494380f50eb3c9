"""Groups and weights that carry their names and checksums, so that a mixture of two is noticed."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from redrb import BufferItem, Experience

ELEMENTS = 96 * 1024
HUGE = 350_000
"""Tokens of a group of 4 MiB: 8 bytes each, and 4 for each of the values of every second one."""
CHUNK_BYTES = 16 * 1024
"""Weights are published in chunks of this size, so that a version has several."""


def group(name: str) -> list[BufferItem]:
    """Return 1 to 3 samples whose values follow from the name of their group."""
    samples = 1 + zlib.crc32(name.encode()) % 3
    lengths = (8 + zlib.crc32(f"{index} {name}".encode()) % 120 for index in range(samples))
    return [_sample(name, index, samples, length) for index, length in enumerate(lengths)]


def sized(name: str) -> BufferItem:
    """Return a group of one sample with 8 to 600 bytes of tensors; of one in 1,000 with 4 MiB."""
    number = zlib.crc32(name.encode())
    return _sample(name, 0, 1, HUGE if number % 1000 == 0 else 1 + number % 50)


def names_of(groups: Iterable[list[BufferItem]]) -> tuple[list[str], list[str]]:
    """Return the names of groups, and what is wrong with their samples."""
    names, torn = [], []
    for items in groups:
        first = items[0].extras
        names.append(first["group"])
        marks = [(item.extras["group"], item.extras["index"]) for item in items]
        if marks != [(first["group"], index) for index in range(first["of"])]:
            torn.append(f"a group of samples {marks}")
        torn += [
            f"sample {mark} has other values than it was put with"
            for mark, item in zip(marks, items, strict=True)
            if _checksum(item.sequences, item.action_log_probs) != item.extras["checksum"]
        ]
    return names, torn


def names_of_batch(batch: Experience, groups: list[str | None]) -> tuple[list[str], list[str]]:
    """Return the names of the groups in a padded batch, and what is wrong with its rows."""
    assert batch.sequences is not None
    assert batch.action_log_probs is not None
    assert not isinstance(batch.extras, Mapping)
    torn, found = [], dict[str, list[int]]()
    rows = zip(batch.sequences, batch.action_log_probs, batch.extras, strict=True)
    for tokens, log_probs, extras in rows:
        found.setdefault(extras["group"], []).append(extras["index"])
        values = _checksum(tokens[tokens != 0], log_probs[log_probs != 0])
        if values != extras["checksum"]:
            torn.append(f"row {extras['group']} {extras['index']} has other values")
    sizes = {extras["group"]: extras["of"] for extras in batch.extras}
    torn += [
        f"group {name} has the samples {indexes}"
        for name, indexes in found.items()
        if indexes != list(range(sizes[name]))
    ]
    if list(found) != groups:
        torn.append(f"the lease names {groups}, the batch {list(found)}")
    return list(found), torn


def weights(content: int) -> dict[str, torch.Tensor]:
    """Return a state whose values all follow from a number; two thirds of it seldom change."""
    slow = torch.arange(2 * ELEMENTS // 3, dtype=torch.int32) + content // 2048
    fast = torch.arange(ELEMENTS // 3, dtype=torch.int32)
    fast[::7] += content
    return {"content": torch.full((4,), content), "slow": slow, "fast": fast}


def content_of(state: Mapping[str, torch.Tensor]) -> tuple[int, list[str]]:
    """Return the number that a state was made from, and the tensors that are of another one."""
    content = int(state["content"][0])
    expected = weights(content)
    return content, [name for name in expected if not torch.equal(state[name], expected[name])]


def _sample(name: str, index: int, samples: int, length: int) -> BufferItem:
    dice = torch.Generator().manual_seed(zlib.crc32(f"{name} {index}".encode()))
    sequences = torch.randint(1, 50_000, (length,), generator=dice)
    log_probs = -0.1 - torch.rand(length // 2, generator=dice)
    extras: dict[str, Any] = {
        "group": name,
        "index": index,
        "of": samples,
        "checksum": _checksum(sequences, log_probs),
    }
    return BufferItem(
        sequences=sequences,
        action_log_probs=log_probs,
        reward=torch.tensor(float(index)),
        advantages=torch.ones(length // 2),
        group_id=name,
        extras=extras,
    )


def _checksum(sequences: torch.Tensor | None, log_probs: torch.Tensor | None) -> int:
    return zlib.crc32(log_probs.numpy().tobytes(), zlib.crc32(sequences.numpy().tobytes()))
