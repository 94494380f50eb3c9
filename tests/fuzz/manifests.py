"""Manifests of weight versions: read in full and written again, or refused."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch

import redrb
from redrb.errors import DecodeError
from redrb.keys import WeightKeys
from redrb.weights.wire.manifest import decode_manifest


def one_input(data: bytes) -> None:
    """Decode one manifest."""
    try:
        manifest = decode_manifest(data)
    except DecodeError:
        return
    assert decode_manifest(msgspec.msgpack.encode(manifest)) == manifest


def seeds() -> Iterator[bytes]:
    """Yield the manifests of a full version and of a delta."""
    weights = {"a": torch.arange(600.0), "b": torch.ones(3, 5, dtype=torch.bfloat16)}
    with redrb.connect("fake://fuzz-manifests") as client:
        publisher = redrb.WeightPublisher(client, "policy")
        for _ in range(2):
            publisher.publish(weights)
            weights["a"][7] += 1
        keys = WeightKeys.of("default", "policy")
        yield from client.execute("HVALS", keys.manifests)
