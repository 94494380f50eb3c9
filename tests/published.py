"""What tests of published weights share: states of every kind, their bits, and the keys left."""

from __future__ import annotations

import random

import torch
from torch import nn

from redrb.connection import Client
from redrb.weights.lora.merging import merged
from redrb.weights.wire.layout import ITEM_BYTES
from redrb.weights.wire.lora_config import LoraConfig

CHUNK_BYTES = "redrb.weights.publishing.publisher.CHUNK_BYTES"
"""Where the size of a publisher's chunks is."""


def every_kind(rows: int = 70) -> dict[str, torch.Tensor]:
    """Every dtype with every bit pattern, and shapes and strides of all kinds."""
    dice = torch.Generator().manual_seed(0)
    state = {}
    for name in ITEM_BYTES:
        if not hasattr(torch, name):  # came with a later torch
            continue
        raw = torch.randint(0, 2 if name == "bool" else 256, (7 * 48,), generator=dice)
        state[name] = raw.to(torch.uint8).view(getattr(torch, name)).reshape(7, -1)
    wide = torch.randn(6, 10, generator=dice)
    state |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 5),
        "transposed": wide.t(),
        "every second": wide[:, ::2],
        "expanded": torch.randn(1, generator=dice).expand(4, 3),
        "tied": wide,
        "tied too": wide,
        "conjugated": torch.randn(5, dtype=torch.complex64, generator=dice).conj(),
        "large": torch.randn(rows, 700, generator=dice, dtype=torch.float64),
    }
    return state


def bits(tensor: torch.Tensor) -> tuple[object, ...]:
    plain = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), plain.view(torch.uint8).numpy().tobytes()


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        bits(left[name]) == bits(right[name]) for name in left
    )


def weights(value: int = 0) -> dict[str, torch.Tensor]:
    """Return 7 chunks of 1024 bytes; of two values few elements differ."""
    dice = torch.Generator().manual_seed(0)
    state = {
        "a": torch.randn(2000, generator=dice).bfloat16(),
        "b": torch.arange(600, dtype=torch.int32),
    }
    state["a"].view(torch.int16)[5:10] += value
    state["b"][-3:] = value
    return state


def zeros() -> dict[str, torch.Tensor]:
    """Return a target for `weights`."""
    return {name: torch.zeros_like(tensor) for name, tensor in weights().items()}


def copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def scribble(state: dict[str, torch.Tensor], dice: random.Random, names: list[str]) -> None:
    """Overwrite some bytes of some tensors with anything."""
    for name in names:
        tensor = state[name]
        flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
        raw = flat.resolve_conj().view(torch.uint8)
        for _ in range(dice.choice([1, 3, len(raw) // 100 + 1])):
            raw[dice.randrange(len(raw))] = dice.randrange(2 if tensor.dtype == torch.bool else 256)


def prefix(namespace: str, name: str = "actor") -> str:
    return f"redrb:{{{namespace}:weights:{name}}}:"


def keys_of(client: Client, namespace: str, name: str = "actor") -> list[str]:
    """All keys of these weights, without their common prefix."""
    start = prefix(namespace, name)
    found = client.execute("KEYS", start.replace("[", "\\[") + "*")
    return sorted(key.decode().removeprefix(start) for key in found)


def lose_all(client: Client, namespace: str) -> None:
    """Delete all keys of these weights, as a server does that restarts empty."""
    client.execute("DEL", *[prefix(namespace) + key for key in keys_of(client, namespace)])


def stored_keys(client: Client, namespace: str) -> list[str]:
    """Keys of chunks and deltas."""
    return [key for key in keys_of(client, namespace) if key.startswith(("chunk:", "delta:"))]


def entries(client: Client, namespace: str) -> dict[int, dict[str, bytes]]:
    """Entries of the stream of versions, by version."""
    found = client.execute("XRANGE", prefix(namespace) + "versions", "-", "+")
    return {
        int(number.partition(b"-")[0]): {
            field.decode(): value for field, value in zip(*[iter(fields)] * 2, strict=True)
        }
        for number, fields in found
    }


def named_keys(client: Client, namespace: str) -> set[str]:
    """Keys of chunks and deltas that committed versions name."""
    named = set()
    for fields in entries(client, namespace).values():
        for kind, runs in (("chunk", fields["full"]), ("delta", fields["pieces"])):
            for run in filter(None, runs.decode().split(";")):
                token, first, count = map(int, run.split())
                named |= {f"{kind}:{token}:{index}" for index in range(first, first + count)}
    return named


def check_nothing_left(client: Client, namespace: str) -> None:
    """Check that every key is needed by a version that is kept, for good."""
    found = entries(client, namespace)
    manifests = client.execute("HKEYS", prefix(namespace) + "manifests")
    assert sorted(map(int, manifests)) == sorted(found)
    others = {"fence", *({"versions", "manifests", "loads"} if found else ())}
    others |= {"fulls" for fields in found.values() if fields["kind"] == b"full"}
    keys = set(keys_of(client, namespace)) - {"followers"}
    wanted = named_keys(client, namespace) | others
    assert sorted(keys - wanted - {"versions"}) == []
    assert sorted(wanted - keys) == []
    assert {client.execute("TTL", prefix(namespace) + key) for key in keys} <= {-1}


class Lora(nn.Module):
    """A linear layer with LoRA, as ColossalAI's."""

    def __init__(self, linear, r=2, alpha=8.0):
        super().__init__()
        self.weight = linear.weight
        self.lora_A = nn.Parameter(torch.randn(r, linear.in_features))
        self.lora_B = nn.Parameter(torch.randn(linear.out_features, r))
        self.r, self.lora_alpha, self.lora_dropout = r, alpha, nn.Dropout(0.0)
        self.fan_in_fan_out = self.merged = False

    def merged_weight(self):
        return merged(self.weight, self.lora_A, self.lora_B, LoraConfig(self.r, self.lora_alpha))
