"""How others move a state dict through Redis: all of it in one key."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import redis
import safetensors.torch
import torch
from torch import Tensor, nn

State = dict[str, Tensor]


def _torch_save(state: State) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _torch_load(stored: bytes) -> Any:
    return torch.load(io.BytesIO(stored))


FORMATS: dict[str, tuple[Callable[[State], bytes], Callable[[bytes], Any]]] = {
    "pickle": (pickle.dumps, pickle.loads),
    "torch.save": (_torch_save, _torch_load),
    "safetensors": (safetensors.torch.save, safetensors.torch.load),
}


def publish(client: redis.Redis, name: str, model: nn.Module) -> None:
    dump, _ = FORMATS[name]
    client.set(f"peer:{name}", dump(model.state_dict()))


def fetch(client: redis.Redis, name: str, model: nn.Module) -> None:
    _, load = FORMATS[name]
    model.load_state_dict(load(client.get(f"peer:{name}")))  # type: ignore[arg-type]
