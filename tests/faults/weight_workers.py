"""Processes that publish or fetch weights, and kill themselves at a certain point."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

import redrb
from redrb.errors import PublisherFenced
from redrb.lua.calls import Call
from redrb.weights.publishing import publisher, upload
from redrb.weights.reading import catalogue
from redrb.weights.wire.lora_config import LoraConfig

ELEMENTS = 32_768  # int16: 64 chunks
KINDS = ("full", "delta", "anchor")
POINTS = ("begin", "chunks", "pieces", "commit", "committed", "advancing", "advanced")


def state(kind: str, number: int) -> dict[str, torch.Tensor]:
    """The state of a version: another one altogether, or one of which little changes."""
    dice = torch.Generator().manual_seed(number if kind == "full" else 0)
    weights = torch.randint(-30_000, 30_000, (ELEMENTS,), dtype=torch.int16, generator=dice)
    if kind != "full":
        dice = torch.Generator().manual_seed(number)
        weights[torch.randint(0, ELEMENTS, (4000,), generator=dice)] += number
    return {"a": weights}


def made(url: str, namespace: str, kind: str) -> tuple[Any, Any]:
    """A client and a publisher of versions of that kind, in small chunks."""
    publisher.CHUNK_BYTES = 1024
    client = redrb.connect(url)
    return client, redrb.WeightPublisher(
        client, "actor", namespace=namespace, keep=1, anchor_every=1 if kind == "anchor" else 25
    )


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_script(name: str, *, after: bool) -> None:
    original = Call.run_with_bytes

    def run(call: Any, *arguments: Any) -> Any:
        if call.script == name and not after:
            die()
        reply = original(call, *arguments)
        if call.script == name:
            die()
        return reply

    Call.run_with_bytes = run  # type: ignore[method-assign]


def die_while_uploading(what: str) -> None:
    original = upload.upload

    def dying(values: Any) -> Any:
        for number, value in enumerate(values):
            if number == 3 and f":{what}:" in value.key.replace("}", ""):
                die()
            yield value

    def send(client: Any, values: Any, *, expire_s: int) -> None:
        # one at a time, so that the first ones have reached the server
        for value in dying(values):
            original(client, [value], expire_s=expire_s)

    upload.upload = send


def publish_and_die(url: str, namespace: str, kind: str, point: str) -> None:
    """Publish version 1, and die at a point of version 2."""
    _, publisher = made(url, namespace, kind)
    publisher.publish(state(kind, 1))
    if point in ("chunks", "pieces"):
        die_while_uploading({"chunks": "chunk", "pieces": "delta"}[point])
    elif point in ("advancing", "advanced"):
        die_at_script("task/advance", after=point == "advanced")
    else:
        name = "weights/begin" if point == "begin" else "weights/commit"
        die_at_script(name, after=point == "committed")
    publisher.publish(state(kind, 2))


def adapter(number: int) -> tuple[dict[str, torch.Tensor], dict[str, LoraConfig]]:
    """An adapter of the layer "0", of several chunks."""
    matrices = {
        "0.lora_A": torch.full((4, 512), 1.0),
        "0.lora_B": torch.full((8, 4), float(number)),
    }
    return matrices, {"0": LoraConfig(4, 4.0)}


def publish_adapter_and_die(url: str, namespace: str, point: str) -> None:
    """Publish weights and an adapter, and die at a point of the next adapter."""
    _, publisher = made(url, namespace, "full")
    publisher.publish({"0.weight": torch.zeros(8, 512)})
    publisher.publish_lora(adapter(1))
    if point == "chunks":
        die_while_uploading("chunk")
    else:
        name = "weights/begin" if point == "begin" else "weights/commit"
        die_at_script(name, after=point == "committed")
    publisher.publish_lora(adapter(2))


def fetch_and_die(url: str, namespace: str) -> None:
    """Die while a version is fetched."""
    original: Callable[..., None] = catalogue.fetch
    calls = []

    def fetch(client: Any, values: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            die()
        original(client, values)

    catalogue.fetch = fetch
    subscriber = redrb.WeightSubscriber(redrb.connect(url), "actor", namespace=namespace)
    subscriber.poll({"a": torch.zeros(ELEMENTS, dtype=torch.int16)})


def publish_and_pause(url: str, namespace: str, kind: str, pipe: Connection) -> None:
    """Publish version 1, and pause before version 2 is committed; tell how that ended."""
    _, publisher = made(url, namespace, kind)
    publisher.publish(state(kind, 1))
    commit = publisher._committer.commit

    def pausing(*arguments: Any) -> Any:
        pipe.send("staged")
        pipe.recv()
        return commit(*arguments)

    publisher._committer.commit = pausing
    try:
        publisher.publish(state(kind, 2))
    except PublisherFenced:
        pipe.send("fenced")
