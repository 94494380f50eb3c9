"""`AccelerateStrategy` in one process: mixed precision, gradient checkpointing, refusals."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redrb.algorithms import GRPOStep
from redrb.algorithms.models import forward_names
from redrb.errors import ConfigError
from redrb.experience import Experience
from redrb.train import AccelerateStrategy, Strategy
from redrb.train.trainer import staleness
from tests.networks import PlainActor, seeded

accelerate_state = pytest.importorskip("accelerate.state")


@pytest.fixture(autouse=True)
def fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate keeps its state in the process."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    accelerate_state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate_state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("device", ["cuda:127", "graphics"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=r"finds|is none"):
        Strategy(device)


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for strategy in (Strategy, AccelerateStrategy):
        with pytest.raises(ConfigError, match=r"finds 0 GPUs\. Install a torch with CUDA"):
            strategy("cuda")


def experience(**changes: Any) -> Experience:
    rows, actions = 2, 3
    return Experience(
        torch.tensor([[4, 5, 6, 7, 8], [8, 7, 6, 5, 4]]),
        torch.full((rows, actions), -2.5),
        None,
        None,
        None,
        torch.tensor([1.0, -1.0]),
        **changes,
    )


def test_mixed_precision_computes_in_bfloat16_and_keeps_the_weights() -> None:
    seen: list[torch.dtype] = []
    strategy = AccelerateStrategy("cpu", mixed_precision="bf16")
    actor = strategy.prepare(seeded(PlainActor))
    assert forward_names(actor) == {"sequences", "attention_mask"}
    actor.head.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    step = GRPOStep(actor, torch.optim.SGD(actor.parameters(), lr=0.1))
    metrics = step(experience())
    assert seen == [torch.bfloat16]
    assert {p.dtype for p in actor.parameters()} == {torch.float32}
    plain = seeded(PlainActor)
    expected = GRPOStep(plain, torch.optim.SGD(plain.parameters(), lr=0.1))(experience())
    assert metrics == pytest.approx(expected, rel=0.02, abs=0.01)


class Checkpointing(nn.Module):
    """A critic's trunk inside a wrapper, with the method of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.inner.gradient_checkpointing_enable = self.enable
        self.options: dict[str, Any] = {}

    def enable(self, options: dict[str, Any]) -> None:
        self.options = options

    def forward(self, sequences: Tensor) -> Tensor:
        return self.inner(sequences)


def test_gradient_checkpointing_is_enabled_and_acts() -> None:
    model = Checkpointing().eval()
    strategy = AccelerateStrategy("cpu", gradient_checkpointing=True)
    assert strategy.prepare(model) is model
    assert model.options == {"use_reentrant": False}
    assert model.training  # transformers checkpoint in training mode only
    with pytest.raises(
        ConfigError, match="PlainActor has no method activation_checkpointing_enable"
    ):
        strategy.prepare(PlainActor())


def test_gradient_checkpointing_of_transformers_gives_the_same_gradient() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=12,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    norms = []
    for checkpointing in (False, True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = transformers.LlamaForCausalLM(config)
        strategy = AccelerateStrategy("cpu", gradient_checkpointing=checkpointing)
        actor = strategy.prepare(model)
        calls: list[int] = []
        actor.model.layers[0].self_attn.register_forward_hook(
            lambda *_, calls=calls: calls.append(1)
        )
        step = GRPOStep(actor, torch.optim.SGD(actor.parameters()), micro_batch_size=1)
        norms.append(step(experience())["actor_grad_norm"])
        assert len(calls) == 2 * (1 + checkpointing)  # of two micro-batches
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[0] > 0


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="mixed_precision"):
        AccelerateStrategy("cpu", mixed_precision="fp16")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ConfigError, match=r"pip install 'accelerate>="):
        AccelerateStrategy("cpu", mixed_precision="bf16").prepare(PlainActor())


def test_frozen_models_and_others_are_only_placed() -> None:
    strategy = AccelerateStrategy("cpu", mixed_precision="bf16", shard=True)
    frozen = PlainActor().requires_grad_(False)
    assert strategy.prepare(frozen) is frozen
    assert strategy.prepare(None) is None


def test_staleness_counts_versions_behind_the_trainers() -> None:
    assert staleness(experience(), 5) == {}
    known = experience(policy_version=[2, None])
    assert staleness(known, 5) == {"staleness_mean": 3.0, "staleness_max": 3.0}
    both = experience(policy_version=[2, 6])
    assert staleness(both, 5) == {"staleness_mean": 1.5, "staleness_max": 3.0}
