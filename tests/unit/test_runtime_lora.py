"""LoRA: what travels, and that merging never drifts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from redrb import LoraConfig
from redrb.errors import DecodeError, WeightMismatch
from redrb.runtime.lora import LoraMerger, decode_configs, encode_configs, lora_of


class LoraLinear(nn.Module):
    """A LoRA layer as ColossalAI's: A and B are parameters beside the weight."""

    def __init__(self, size: int, r: int, alpha: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size), requires_grad=False)
        self.lora_A = nn.Parameter(torch.randn(r, size))
        self.lora_B = nn.Parameter(torch.randn(size, r))
        self.r, self.lora_alpha, self.lora_dropout = r, alpha, nn.Dropout(0.1)
        self.fan_in_fan_out = False


def test_what_travels_is_a_and_b_with_their_settings() -> None:
    model = nn.Sequential(nn.Linear(4, 4), LoraLinear(4, 2, 8.0))
    tensors, configs = lora_of(model)
    assert sorted(tensors) == ["1.lora_A", "1.lora_B"]
    assert configs == {"1": LoraConfig(2, 8.0, 0.1, fan_in_fan_out=False)}
    assert decode_configs(encode_configs({"actor": configs})) == {"actor": configs}


def test_damaged_settings_are_refused() -> None:
    assert decode_configs("") == {}
    for text in ("{", "[]", '{"actor": {"1": {"rank": 2}}}', '{"actor": 3}'):
        with pytest.raises(DecodeError):
            decode_configs(text)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_merged_weight_is_base_plus_the_newest_product(transposed: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False))
    base = model[0].weight.detach().clone()
    merger = LoraMerger(model)
    config = {"0": LoraConfig(2, 4.0, 0.0, transposed)}
    for _ in range(1000):
        a, b = torch.randn(2, 3), torch.randn(3, 2)
        merger.apply(merger.plan({"0.lora_A": a, "0.lora_B": b}, config))
    product = (b @ a) * 2
    assert torch.equal(model[0].weight, base + (product.T if transposed else product))
    merger.apply(merger.plan({"0.lora_A": a * 0, "0.lora_B": b}, config))
    assert torch.equal(model[0].weight, base)


def test_names_of_peft_are_understood() -> None:
    model = nn.Sequential(nn.Linear(3, 5, bias=False))
    base = model[0].weight.detach().clone()
    a, b = torch.randn(2, 3), torch.randn(5, 2)
    merger = LoraMerger(model)
    state = {
        "base_model.model.0.lora_A.default.weight": a,
        "base_model.model.0.lora_B.default.weight": b,
    }
    merger.apply(merger.plan(state, {"0": LoraConfig(2, 2.0)}))
    assert torch.allclose(model[0].weight, base + b @ a)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"0.weight": torch.zeros(3, 3)}, "not a LoRA tensor"),
        ({"0.lora_A": torch.zeros(2, 3)}, "only lora_A"),
        ({"9.lora_A": torch.zeros(2, 3), "9.lora_B": torch.zeros(3, 2)}, "no such layer"),
        ({"0.lora_A": torch.zeros(2, 4), "0.lora_B": torch.zeros(3, 2)}, "makes"),
    ],
)
def test_what_does_not_fit_changes_nothing(state: dict[str, torch.Tensor], told: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False))
    before = model[0].weight.detach().clone()
    with pytest.raises(WeightMismatch, match=told):
        LoraMerger(model).plan(state, {"0": LoraConfig(2, 2.0)})
    with pytest.raises(WeightMismatch, match="no settings"):
        LoraMerger(model).plan({"0.lora_A": torch.zeros(2, 3), "0.lora_B": torch.zeros(3, 2)}, {})
    assert torch.equal(model[0].weight, before)
