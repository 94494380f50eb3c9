"""Workers of one vLLM agree before weights change: an error of one is that of the server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest

from redrb.errors import DecodeError, EngineError, StoreUnavailable, WeightCorrupt, WeightMismatch
from redrb.train.engines import VLLMEngine
from redrb.train.engines.engine import Published, WeightsKeptError, WeightsUnreachableError

A, B = TypeVar("A"), TypeVar("B")
_BASE = "vllm.distributed.weight_transfer.base"
_RELOAD = "vllm.model_executor.model_loader.reload"


class _Engine(Generic[A, B]):
    pass


@pytest.fixture
def engine_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The backend, with stand-ins for the modules of vLLM that it imports."""
    info = type("Info", (), {})
    names = {
        "vllm.envs": {},
        "vllm.distributed.parallel_state": {
            "get_world_group": lambda: SimpleNamespace(cpu_group=0)
        },
        _BASE: {
            "WeightTransferEngine": _Engine,
            "WeightTransferInitInfo": info,
            "WeightTransferUpdateInfo": info,
        },
        _RELOAD: {"finalize_layerwise_reload": None, "initialize_layerwise_reload": None},
        f"{_RELOAD}.layerwise": {"get_layerwise_info": None},
    }
    for name, contents in names.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        vars(sys.modules[name]).update(contents)
    monkeypatch.delitem(sys.modules, "redrb.compat.vllm.transfer", raising=False)
    from redrb.compat.vllm import transfer

    yield transfer
    sys.modules.pop("redrb.compat.vllm.transfer", None)


@pytest.mark.parametrize(
    ("failed", "kind", "is_damage"),
    [
        (StoreUnavailable("away", where="here"), WeightsUnreachableError, False),
        (WeightCorrupt("torn"), WeightsKeptError, True),
        (DecodeError("torn"), WeightsKeptError, True),
        (WeightMismatch("too large"), WeightsKeptError, False),
    ],
)
@pytest.mark.parametrize("worker", [0, 1])
def test_the_error_of_any_worker_is_known(
    engine_class: Any,
    monkeypatch: pytest.MonkeyPatch,
    failed: Any,
    kind: Any,
    is_damage: bool,
    worker: int,
) -> None:
    """Of vLLM comes the message of the first worker that raises one."""
    transfer = engine_class
    others = f"redrb {type(failed).__name__}: {failed}"
    sent: list[Any] = []

    def gather(of_all: list[Any], mine: Any, group: Any) -> None:
        sent.append(mine[1])
        of_all[:] = [mine, (None, others if worker else None)]

    monkeypatch.setattr(transfer.torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(transfer.torch.distributed, "get_world_size", lambda _: 2)
    first = object.__new__(transfer.RedrbWeightTransferEngine)
    first.parallel_config = SimpleNamespace(world_size=2)

    def step() -> None:
        if not worker:
            raise failed

    with pytest.raises(RuntimeError) as caught:
        transfer._naming(lambda: first._of_first(step))()
    assert sent == [None if worker else others]  # as the other workers hear it

    engine = VLLMEngine("http://127.0.0.1:1", model="")

    async def refused(_: Any) -> None:
        raise EngineError(str(caught.value), where="", status=200)

    monkeypatch.setattr(engine, "_receive", refused)
    with pytest.raises(WeightsKeptError) as kept:
        asyncio.run(engine._load(Published({}, 1, 0.0, "")))
    assert (type(kept.value), kept.value.is_damage) == (kind, is_damage)
