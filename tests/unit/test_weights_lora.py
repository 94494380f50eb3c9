"""LoRA: published tensors, refused models, a merge that never drifts, PEFT's folder."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import msgspec
import pytest
import torch
from torch import Tensor, nn

from redrb.errors import ConfigError, DecodeError, EncodeError, WeightMismatch
from redrb.weights.files.adapter_folder import exchange, load_adapter, lora_of_state, save_adapter
from redrb.weights.lora.adapter import adapter_of
from redrb.weights.lora.layers import lora_of
from redrb.weights.lora.merging import LoraMerger, merged
from redrb.weights.wire.lora_config import LoraConfig


class CoatiLinear(nn.Module):
    """A LoRA layer as ColossalAI's: A and B are parameters beside the weight."""

    def __init__(self, size: int = 4, r: int = 2, alpha: float = 8.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size), requires_grad=False)
        self.lora_A = nn.Parameter(torch.randn(r, size))
        self.lora_B = nn.Parameter(torch.randn(size, r))
        self.r, self.lora_alpha, self.lora_dropout = r, alpha, nn.Dropout(0.1)
        self.fan_in_fan_out = False
        self.merged = False


class PeftLinear(nn.Module):
    """A LoRA layer as PEFT's: everything by adapter."""

    def __init__(self, base: nn.Module | None = None, adapters: tuple[str, ...] = ("default",)):
        super().__init__()
        self.base_layer = base or nn.Linear(3, 5, bias=False)
        self.r, self.lora_alpha = dict.fromkeys(adapters, 2), dict.fromkeys(adapters, 6)
        self.use_rslora = dict.fromkeys(adapters, False)
        self.scaling = dict.fromkeys(adapters, 3.0)
        self.lora_bias = dict.fromkeys(adapters, False)
        self.lora_variant: dict[str, Any] = {}
        self.lora_dropout = nn.ModuleDict({name: nn.Dropout(0.5) for name in adapters})
        self.lora_A = nn.ModuleDict({name: nn.Linear(3, 2, bias=False) for name in adapters})
        self.lora_B = nn.ModuleDict({name: nn.Linear(2, 5, bias=False) for name in adapters})
        self.lora_embedding_A = nn.ParameterDict()
        self.lora_magnitude_vector = nn.ModuleDict()
        self.active_adapters = ["default"]
        self.merged = False
        self.fan_in_fan_out = False


def peft_model(layer: nn.Module) -> nn.Module:
    """Return a model with PEFT's two modules around it; the layer is `0`."""
    model = nn.Module()
    model.base_model = nn.Module()
    model.base_model.model = nn.Sequential(layer)
    return model


def plain_model() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(3, 5, bias=False))
    return model, model[0].weight.detach().clone()


def test_a_and_b_are_published_with_their_settings():
    model = nn.Sequential(nn.Linear(4, 4), CoatiLinear())
    tensors, configs = lora_of(model)
    assert list(tensors) == ["1.lora_A", "1.lora_B"]
    assert tensors["1.lora_A"] is model[1].lora_A
    assert configs == {"1": LoraConfig(2, 8.0, 0.1)}
    assert lora_of(nn.Linear(2, 2)) == ({}, {})
    assert list(lora_of(CoatiLinear())[0]) == ["lora_A", "lora_B"]


def test_layers_of_peft_travel_under_the_names_of_the_plain_model():
    layer = PeftLinear(adapters=("default", "other"))
    layer.use_rslora["default"], layer.scaling["default"] = True, 6 / math.sqrt(2)
    tensors, configs = lora_of(peft_model(layer))
    assert list(tensors) == ["0.lora_A", "0.lora_B"]
    assert tensors["0.lora_B"] is layer.lora_B["default"].weight
    assert configs == {"0": LoraConfig(2, 6.0, 0.5, use_rslora=True)}
    assert configs["0"].scale == 6 / math.sqrt(2)
    layer.active_adapters = ["other"]
    assert lora_of(peft_model(layer))[0]["0.lora_A"] is layer.lora_A["other"].weight
    layer.active_adapters = ["elsewhere"]
    assert lora_of(peft_model(layer)) == ({}, {})


class CoatiEmbedding(nn.Embedding):
    """A LoRA embedding as ColossalAI's."""

    def __init__(self) -> None:
        super().__init__(7, 3)
        self.r, self.lora_alpha, self.lora_dropout = 2, 4, 0.0
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(2, 7)), nn.Parameter(torch.randn(3, 2))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.lora_A.T[tokens] @ self.lora_B.T * 2


def test_embeddings_of_coati_are_merged_too():
    model, plain = nn.Sequential(CoatiEmbedding()), nn.Sequential(nn.Embedding(7, 3))
    plain.load_state_dict({"0.weight": model[0].weight})
    merger = LoraMerger(plain)
    merger.apply(merger.plan(*lora_of(model)))
    torch.testing.assert_close(plain(torch.arange(7)), model(torch.arange(7)))


def test_a_layer_of_no_rank_is_refused():
    with pytest.raises(EncodeError, match=r"layer '0'.* r is 0"):
        lora_of(nn.Sequential(CoatiLinear(r=0)))


def test_a_scale_that_was_set_by_hand_counts():
    layer = PeftLinear()
    layer.scaling["default"] = 0.7
    assert lora_of(layer)[1][""].scale == pytest.approx(0.7)


def compiled(module: nn.Module) -> nn.Module:
    """Return a module that would be compiled when it is called."""
    wrapped: nn.Module = torch.compile(module, backend="eager")
    return wrapped


def test_wrapped_models_and_layers_have_the_layers_of_plain_ones():
    layer, embedding = PeftLinear(), CoatiEmbedding()
    wrapped = compiled(nn.DataParallel(peft_model(compiled(layer))))
    tensors, configs = lora_of(wrapped)
    assert (tensors, configs) == lora_of(peft_model(layer))
    assert list(tensors) == ["0.lora_A", "0.lora_B"]
    assert lora_of(nn.Sequential(compiled(embedding)))[1] == {
        "0": LoraConfig(2, 4.0, fan_in_fan_out=True)
    }
    a, b = torch.randn(2, 3), torch.randn(5, 2)
    merger = LoraMerger(wrapped)
    merger.apply(merger.plan({"0.lora_A": a, "0.lora_B": b}, configs))
    assert torch.equal(layer.lora_A["default"].weight, a)
    layer.base_layer = compiled(nn.MultiheadAttention(4, 2))
    with pytest.raises(EncodeError, match="MultiheadAttention"):
        lora_of(wrapped)


@pytest.mark.parametrize("inside", [False, True])
def test_an_adapter_is_merged_into_a_compiled_model(inside):
    model, base = plain_model()
    layer = model[0]
    wrapped = nn.Sequential(compiled(layer)) if inside else compiled(model)
    merger = LoraMerger(wrapped)
    for seed in (1, 2):
        a, b = torch.full((2, 3), seed), torch.ones(5, 2)
        merger.apply(merger.plan({"0.lora_A": a, "0.lora_B": b}, {"0": LoraConfig(2, 2.0)}))
        assert torch.equal(layer.weight, merged(base, a, b, LoraConfig(2, 2.0)))
    with torch.no_grad():
        layer.weight.fill_(3)
    merger.forget({"0.weight"})  # as a reader names what it has just loaded
    merger.apply(merger.plan({"0.lora_A": a, "0.lora_B": b}, {"0": LoraConfig(2, 2.0)}))
    assert torch.equal(layer.weight, torch.full((5, 3), 7.0))


def test_layers_of_peft_itself():
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["0"])
    adapted = peft.get_peft_model(model, config)
    layer = adapted.base_model.model[0]
    for of in (lora_of, adapter_of):
        for wrapped in (adapted, compiled(adapted), nn.DataParallel(compiled(adapted))):
            tensors, configs = of(wrapped)
            assert list(tensors) == ["0.lora_A", "0.lora_B"]
            assert tensors["0.lora_A"] is layer.lora_A["default"].weight
            assert configs == {"0": LoraConfig(2, 6.0)}
    first = nn.Sequential(compiled(nn.Sequential(nn.Linear(3, 5))), nn.Linear(5, 3))
    inner = peft.get_peft_model(first, peft.LoraConfig(r=2, target_modules=r".*0\.0|.*mod\.0"))
    assert list(lora_of(inner)[0]) == ["0.0.lora_A", "0.0.lora_B"]


def _dora(layer: PeftLinear) -> None:
    layer.lora_magnitude_vector["default"] = nn.Identity()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_variant": {"default": object()}}, "variant"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ],
)
def test_layers_that_peft_makes_of_other_modules_are_refused(change, message):
    layer = PeftLinear()
    vars(layer).update(change)
    with pytest.raises(EncodeError, match=message) as failure:
        lora_of(peft_model(layer))
    assert "layer '0" in str(failure.value)
    assert "Use " in str(failure.value)


def test_settings_go_over_the_wire_and_back():
    configs = {
        "layers.0": LoraConfig(2, 8.0, 0.1, fan_in_fan_out=True),
        "": LoraConfig(4, 1, use_rslora=True),
    }
    wired = msgspec.msgpack.encode(configs)
    lists = {"layers.0": [2, 8.0, 0.1, True, False], "": [4, 1.0, 0.0, False, True]}
    assert msgpack.unpackb(wired) == lists
    assert msgspec.msgpack.decode(wired, type=dict[str, LoraConfig]) == configs


def test_wrong_settings_are_refused_where_they_are_made():
    for wrong in ({"r": 0}, {"lora_alpha": math.inf}, {"lora_dropout": 2}, {"use_rslora": 1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            LoraConfig(**{"r": 2, "lora_alpha": 1.0, **wrong})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_thousand_updates_are_one_bit_for_bit(dtype, transposed):
    torch.manual_seed(0)
    shape = (3, 5) if transposed else (5, 3)
    model = nn.Sequential(nn.Linear(*shape[::-1], bias=False)).to(dtype)
    base = model[0].weight.detach().clone()
    config = LoraConfig(2, 4.0, 0.0, transposed)
    merger = LoraMerger(model)
    for _ in range(1000):
        a, b = torch.randn(2, 3, dtype=dtype), torch.randn(5, 2, dtype=dtype)
        merger.apply(merger.plan({"0.lora_A": a, "0.lora_B": b}, {"0": config}))
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    product = (b.to(compute) @ a.to(compute)) * 2
    expected = (base.to(compute) + (product.T if transposed else product)).to(dtype)
    assert torch.equal(model[0].weight, expected)
    assert torch.equal(merged(base, a, b, config), expected)
    assert merged(base, a, b, config).dtype == dtype
    merger.apply(merger.plan({"0.lora_A": a * 0, "0.lora_B": b}, {"0": config}))
    assert torch.equal(model[0].weight, base)


def test_merging_pays_no_heed_to_autocast():
    base, a, b = torch.zeros(5, 3), torch.randn(2, 3), torch.randn(5, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = merged(base, a, b, LoraConfig(2, 2.0))
    assert torch.equal(found, b @ a)


def test_rank_stabilized_lora_has_another_scale():
    a, b = torch.ones(4, 3), torch.ones(5, 4)
    found = merged(torch.zeros(5, 3), a, b, LoraConfig(4, 6.0, use_rslora=True))
    assert torch.equal(found, torch.full((5, 3), 12.0))


def test_a_full_update_is_a_new_base():
    model, _ = plain_model()
    state = {"0.lora_A": torch.ones(1, 3), "0.lora_B": torch.ones(5, 1)}
    merger = LoraMerger(model)
    for base in (0.0, 5.0):
        with torch.no_grad():
            model[0].weight.fill_(base)
        merger.forget()
        for _ in range(2):
            merger.apply(merger.plan(state, {"0": LoraConfig(1, 1.0)}))
            assert torch.equal(model[0].weight, torch.full((5, 3), base + 1))


NAMINGS = ["0.lora_{}", "0.lora_{}.weight", "base_model.model.0.lora_{}.default.weight"]


@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming_fits_every_model(naming):
    a, b = torch.randn(2, 3), torch.randn(5, 2)
    state = {naming.format("A"): a, naming.format("B"): b}
    config = LoraConfig(2, 6.0)
    model, base = plain_model()
    merger = LoraMerger(model)
    merger.apply(merger.plan(state, {"0": config}))
    assert torch.equal(model[0].weight, merged(base, a, b, config))

    wrapped = peft_model(layer := PeftLinear())
    base = layer.base_layer.weight.detach().clone()
    merger = LoraMerger(wrapped)
    merger.apply(merger.plan(state, {"base_model.model.0": config}))
    assert torch.equal(layer.lora_A["default"].weight, a)
    assert torch.equal(layer.lora_B["default"].weight, b)
    assert torch.equal(layer.base_layer.weight, base)

    coati = nn.Sequential(CoatiLinear(3, 2, 6.0))
    merger = LoraMerger(coati)
    square = {name: tensor[:3] for name, tensor in state.items()}
    merger.apply(merger.plan(square, {}))
    assert torch.equal(coati[0].lora_A, a)
    assert torch.equal(coati[0].lora_B, b[:3])


@pytest.mark.parametrize("inside", [None, "actor"])
def test_an_adapter_of_peft_is_merged_into_a_plain_model(inside):
    """Also where the model is one of several."""
    trained, (plain, base) = peft_model(layer := PeftLinear()), plain_model()
    models = [
        each if inside is None else nn.ModuleDict({inside: each}) for each in (trained, plain)
    ]
    merger = LoraMerger(models[1])
    merger.apply(merger.plan(*lora_of(models[0])))
    a, b = (getattr(layer, f"lora_{half}")["default"].weight for half in "AB")
    [config] = lora_of(trained)[1].values()
    assert torch.equal(plain[0].weight, merged(base, a, b, config))


def test_settings_may_be_any_object_with_their_names():
    class Coati:
        r, lora_alpha = 2, 6

    model, base = plain_model()
    a, b = torch.randn(2, 3), torch.randn(5, 2)
    merger = LoraMerger(model)
    merger.apply(merger.plan({"0.lora_A": a, "0.lora_B": b}, {"0": Coati()}))
    assert torch.equal(model[0].weight, merged(base, a, b, LoraConfig(2, 6.0)))
    with pytest.raises(WeightMismatch, match="no LoraConfig"):
        merger.plan({"0.lora_A": a, "0.lora_B": b}, {"0": object()})


GOOD = {"0.lora_A": torch.zeros(2, 3), "0.lora_B": torch.zeros(5, 2)}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"0.weight": torch.zeros(3, 3)}, "not a LoRA tensor"),
        ({"0.lora_B.bias": torch.zeros(3)}, "not a LoRA tensor"),
        ({"0.lora_embedding_A": torch.zeros(3)}, "not a LoRA tensor"),
        ({**GOOD, "0.lora_A.weight": torch.zeros(2, 3)}, "comes twice"),
        ({"0.lora_A": torch.zeros(2, 3)}, "only lora_A"),
        ({"9.lora_A": torch.zeros(2, 3), "9.lora_B": torch.zeros(3, 2)}, "no such layer"),
        ({**GOOD, "0.lora_A": torch.zeros(2, 4)}, "is \\[5, 4\\], but"),
        ({**GOOD, "0.lora_A": torch.zeros(3, 3)}, "not \\[r, in\\]"),
        ({**GOOD, "0.lora_A": torch.zeros(2, 3, 1, 1)}, "not \\[r, in\\]"),
        ({"0.lora_A": torch.zeros(4, 3), "0.lora_B": torch.zeros(5, 4)}, "r=2"),
    ],
)
def test_a_mismatch_changes_nothing(state, message):
    model, before = plain_model()
    with pytest.raises(WeightMismatch, match=message):
        LoraMerger(model).plan(state, {"0": LoraConfig(2, 2.0), "9": LoraConfig(2, 2.0)})
    with pytest.raises(WeightMismatch, match="no settings"):
        LoraMerger(model).plan(GOOD, {})
    assert torch.equal(model[0].weight, before)


def test_layers_that_would_read_a_and_b_otherwise_are_refused():
    layer = PeftLinear()
    merger = LoraMerger(peft_model(layer))
    with pytest.raises(WeightMismatch, match="scale"):
        merger.plan(GOOD, {"0": LoraConfig(2, 7.0)})
    with pytest.raises(WeightMismatch, match="rank 2, but its settings say r=4"):
        merger.plan(GOOD, {"0": LoraConfig(4, 12.0)})
    with pytest.raises(WeightMismatch, match="the model's \\[2, 3\\]"):
        merger.plan({"0.lora_A": torch.zeros(1, 3), "0.lora_B": torch.zeros(5, 1)}, {})
    layer.merged = True
    with pytest.raises(WeightMismatch, match="Unmerge"):
        merger.plan(GOOD, {})
    layer.merged = False
    _dora(layer)
    with pytest.raises(WeightMismatch, match="DoRA"):
        merger.plan(GOOD, {})


def test_weights_that_cannot_take_a_product_are_refused():
    tied = nn.Module()
    tied.read, tied.embed = nn.Linear(3, 5, bias=False), nn.Embedding(5, 3)
    tied.read.weight = tied.embed.weight
    state = {f"read.{name[2:]}": tensor for name, tensor in GOOD.items()}
    with pytest.raises(WeightMismatch, match="are one tensor"):
        LoraMerger(tied).plan(state, {"read": LoraConfig(2, 1.0)})
    shared = nn.Sequential(layer := nn.Linear(3, 5, bias=False), layer)
    assert LoraMerger(shared).plan(GOOD, {"0": LoraConfig(2, 1.0)})
    packed, _ = plain_model()
    packed[0].weight = nn.Parameter(torch.zeros(5, 3, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(WeightMismatch, match="uint8"):
        LoraMerger(packed).plan(GOOD, {"0": LoraConfig(2, 1.0)})


# what is published is what a reader would take


TWO = LoraConfig(2, 2.0)


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        ({**GOOD, "0.lora_A": torch.zeros(4, 16)}, {"0": TWO}, "not \\[r, in\\]"),
        (GOOD, {"0": LoraConfig(4, 2.0)}, "has rank 2, but its settings say r=4"),
        (GOOD, {}, "'0' cannot be merged: it has no settings"),
        (GOOD, {"0": None}, "'0' cannot be merged: it has no settings"),
        (GOOD, {"1": TWO}, "'0' cannot be merged: it has no settings"),
        (GOOD, {"0": object()}, "no LoraConfig"),
        ({"0.lora_A": torch.zeros(2, 3)}, {"0": TWO}, "'0' has only lora_A"),
        ({"0.A": torch.zeros(2, 3), "0.B": torch.zeros(5, 2)}, {"0": TWO}, "not a LoRA tensor"),
        ({**GOOD, "0.lora_A.weight": torch.zeros(2, 3)}, {"0": TWO}, "comes twice"),
        ({**GOOD, "0.lora_B": None}, {"0": TWO}, "a NoneType, not a tensor"),
        (GOOD, {"0": TWO, "1": TWO}, "settings of 1, but no lora_A.* are 0"),
    ],
)
def test_an_adapter_that_readers_would_refuse_is_not_published(tensors, settings, message):
    with pytest.raises(EncodeError, match=message) as failure:
        adapter_of((tensors, settings))
    assert str(failure.value).endswith("Nothing was published.")


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (None, "of a NoneType: give a model with LoRA layers"),
        (GOOD, "of a dict"),
        ((GOOD,), "of a tuple"),
        ((GOOD, LoraConfig(2, 2.0)), "a LoraConfig by layer"),
        (({0: GOOD["0.lora_A"]}, {}), "0: names of an adapter"),
        ((GOOD, {0: LoraConfig(2, 2.0)}), "0: names of an adapter"),
        (({}, {}), "no LoRA layers"),
        (nn.Linear(2, 2), "no LoRA layers"),
    ],
)
def test_other_values_than_adapters_are_refused(adapter, message):
    with pytest.raises(ConfigError, match=message):
        adapter_of(adapter)


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("layer", ["0", "base_model.model.0"])
def test_an_adapter_that_readers_take_is_published_unchanged(naming, layer):
    class Coati:
        r, lora_alpha = 2, 6

    state = {naming.format(half): GOOD[f"0.lora_{half}"] for half in "AB"}
    for settings in (LoraConfig(2, 6.0), Coati()):
        tensors, configs = adapter_of((state, {layer: settings}))
        assert tensors == state
        assert configs == {layer: LoraConfig(2, 6.0)}
        model, _ = plain_model()
        assert LoraMerger(model).plan(tensors, configs)
    model = nn.Sequential(CoatiLinear(), CoatiLinear(r=1))
    assert adapter_of(model) == lora_of(model)


def test_a_state_dict_and_settings_are_enough():
    state = {f"base_model.model.{name}.weight": tensor for name, tensor in GOOD.items()}
    state |= {name.replace("0.", "x.1."): tensor for name, tensor in GOOD.items()}
    tensors, configs = lora_of_state(state, LoraConfig(2, 4.0))
    assert list(tensors) == ["0.lora_A", "0.lora_B", "x.1.lora_A", "x.1.lora_B"]
    assert tensors["0.lora_A"] is GOOD["0.lora_A"]
    assert configs == dict.fromkeys(["0", "x.1"], LoraConfig(2, 4.0))
    peft = {
        "peft_type": "LORA",
        "r": 8,
        "rank_pattern": {"1": 2, "^0": 2},
        "alpha_pattern": {"x.[0-9]": 3},
        "lora_alpha": 5,
        "use_rslora": True,
        "lora_dropout": 0.5,
        "init_lora_weights": "gaussian",
        "use_dora": False,
        "bias": "none",
    }
    _, configs = lora_of_state(state, peft)
    assert configs == {
        "0": LoraConfig(2, 5.0, 0.5, use_rslora=True),
        "x.1": LoraConfig(2, 3.0, 0.5, use_rslora=True),
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 3}, "rank 2"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "lora_only"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "convert"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"rank_pattern": []}, ""),
        ({"rank_pattern": {"(": 2}}, "patterns"),
        ({"alpha_pattern": [1]}, "not a map"),
    ],
)
def test_settings_that_are_not_plain_lora_are_refused(settings, message):
    if not message:
        assert lora_of_state(GOOD, {"r": 2, **settings})
        return
    with pytest.raises(EncodeError, match=message):
        lora_of_state(GOOD, {"r": 2, **settings})
    with pytest.raises(EncodeError, match="rank 2"):
        lora_of_state(GOOD, LoraConfig(3, 1.0))


# PEFT's folder


def adapter(*configs: LoraConfig) -> tuple[dict[str, Tensor], dict[str, LoraConfig]]:
    tensors = {}
    for index, config in enumerate(configs):
        tensors[f"m.{index}.lora_A"] = torch.randn(config.r, 3)
        tensors[f"m.{index}.lora_B"] = torch.randn(5, config.r)
    return tensors, {f"m.{index}": config for index, config in enumerate(configs)}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_an_adapter_folder_equals_peft_s(tmp_path):
    from safetensors import safe_open

    tensors, configs = adapter(LoraConfig(2, 8.0, 0.1), LoraConfig(2, 8.0, 0.1))
    save_adapter(tmp_path / "a", tensors, configs, base_model="org/model", task_type="CAUSAL_LM")
    assert sorted(file.name for file in tmp_path.rglob("*")) == [
        "a",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text()) == {
        "alpha_pattern": {},
        "base_model_name_or_path": "org/model",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 2,
        "rank_pattern": {},
        "target_modules": ["m.0", "m.1"],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    with safe_open(tmp_path / "a" / "adapter_model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert sorted(file.keys()) == sorted(f"base_model.model.{name}.weight" for name in tensors)
    found, settings = load_adapter(tmp_path / "a")
    assert same(found, tensors)
    assert settings == configs


def test_layers_of_other_ranks_with_one_scale_stay_as_they_are(tmp_path):
    tensors, configs = adapter(LoraConfig(2, 4.0), LoraConfig(4, 8.0))
    save_adapter(tmp_path / "a", tensors, configs)
    written = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"]) == (4, 8)
    assert written["rank_pattern"] == {"^m\\.0": 2}
    assert written["alpha_pattern"] == {"^m\\.0": 4}
    found, settings = load_adapter(tmp_path / "a")
    assert same(found, tensors)
    assert settings == configs


def test_layers_of_other_scales_get_one_and_the_same_product(tmp_path):
    configs = (LoraConfig(2, 3.0), LoraConfig(4, 8.0), LoraConfig(2, 5.0, use_rslora=True))
    tensors, settings = adapter(*configs)
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_adapter(tmp_path / "a", tensors, settings)
    found, read = load_adapter(tmp_path / "a")
    assert {config.scale for config in read.values()} == {2.0}
    assert not any(config.use_rslora for config in read.values())
    assert found["m.1.lora_B"].dtype == torch.bfloat16
    for layer, config in settings.items():
        a, b = f"{layer}.lora_A", f"{layer}.lora_B"
        before = merged(torch.zeros(5, 3), tensors[a], tensors[b], config)
        after = merged(torch.zeros(5, 3), found[a], found[b], read[layer])
        torch.testing.assert_close(after, before)


def test_an_adapter_replaces_an_earlier_one_and_keeps_other_files(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    save_adapter(folder, *adapter(LoraConfig(2, 4.0)))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "adapter_model.bin").write_text("stale")
    (tmp_path / "link").symlink_to(folder)
    tensors, configs = adapter(LoraConfig(3, 4.0))
    save_adapter(tmp_path / "link", tensors, configs)
    assert same(load_adapter(folder)[0], tensors)
    assert sorted(file.name for file in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    ]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "link"]


def test_an_engine_finds_both_files_at_every_moment(tmp_path):
    good = adapter(LoraConfig(2, 4.0))
    save_adapter(tmp_path / "a", *good)
    done, missed = threading.Event(), 0

    def engine():
        nonlocal missed
        while not done.is_set():
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                missed += not (tmp_path / "a" / name).stat().st_size

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(engine)
        for _ in range(50):
            save_adapter(tmp_path / "a", *good)
        done.set()
        reading.result(20)
    assert not missed


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    good = adapter(LoraConfig(2, 4.0))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("mine")
    for name in ("file", "folder"):
        with pytest.raises(ConfigError, match="no adapter"):
            save_adapter(tmp_path / name, *good)
    save_adapter(tmp_path / "a", *good)
    (tmp_path / "a" / "other").mkdir()
    with pytest.raises(ConfigError, match="'other'"):
        save_adapter(tmp_path / "a", *good)
    with pytest.raises(ConfigError, match="cannot be written"):
        save_adapter(tmp_path / "missing" / "a", *good)
    assert len(list(tmp_path.iterdir())) == 3


def test_other_files_are_refused_before_anything_is_written(tmp_path):
    tensors, configs = adapter(LoraConfig(2, 4.0), LoraConfig(2, 4.0, fan_in_fan_out=True))
    for wrong in ((tensors, configs), ({}, {}), (tensors, {}), ({"w": tensors["m.0.lora_A"]}, {})):
        with pytest.raises(EncodeError):
            save_adapter(tmp_path / "a", *wrong)
    with pytest.raises(EncodeError, match="lora_alpha=0"):
        save_adapter(tmp_path / "a", *adapter(LoraConfig(2, 0.0), LoraConfig(2, 1.0)))
    assert list(tmp_path.iterdir()) == []


def test_damaged_adapters_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no adapter_model"):
        load_adapter(tmp_path)
    save_adapter(tmp_path, *adapter(LoraConfig(2, 4.0)))
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    for wrong in ("{", "[]", json.dumps({**settings, "r": 3}), json.dumps({"use_dora": True})):
        (tmp_path / "adapter_config.json").write_text(wrong)
        with pytest.raises(DecodeError):
            load_adapter(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_adapter(tmp_path)


def test_a_file_system_without_exchange_does_two_renames(tmp_path, monkeypatch):
    class Libc:
        renameat2 = None

    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: Libc())
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    exchange(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "other" / "one").exists()
    assert (tmp_path / "one" / "other").exists()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks transformers for old names
def test_peft_reads_our_folders_and_we_publish_peft_s_adapters(tmp_path):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    base = transformers.LlamaForCausalLM(config).eval()
    weights = {name: tensor.clone() for name, tensor in base.state_dict().items()}

    def fresh():
        model = transformers.LlamaForCausalLM(config).eval()
        model.load_state_dict(weights)
        return model

    def logits(model):
        with torch.no_grad():
            found: Tensor = model(torch.arange(8)[None]).logits
        return found

    for number, more in enumerate(
        (
            {"use_rslora": True},
            {"rank_pattern": {"layers.1.self_attn.q_proj": 2}},
            {"alpha_pattern": {"v_proj": 5}},
        )
    ):
        settings = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], **more
        )
        trained = peft.get_peft_model(fresh(), settings).eval()
        tensors, configs = lora_of(trained)
        assert len(configs) == 6
        assert "model.layers.0.self_attn.q_proj.lora_A" in tensors
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.normal_()
        wanted = logits(trained)
        assert not torch.allclose(wanted, logits(base))

        save_adapter(tmp_path / str(number), tensors, configs, base_model=None)
        loaded = peft.PeftModel.from_pretrained(fresh(), tmp_path / str(number)).eval()
        torch.testing.assert_close(logits(loaded), wanted)

        trained.save_pretrained(tmp_path / f"peft{number}")
        read, read_configs = load_adapter(tmp_path / f"peft{number}")
        assert same(read, {name: tensor.detach() for name, tensor in tensors.items()})
        assert read_configs == configs

        maker = fresh()  # no LoRA layers of its own
        merger = LoraMerger(maker)
        merger.apply(merger.plan(tensors, configs))
        torch.testing.assert_close(logits(maker), wanted)

        maker = peft.get_peft_model(fresh(), settings).eval()  # LoRA layers of its own
        merger = LoraMerger(maker)
        merger.apply(merger.plan(tensors, configs))
        torch.testing.assert_close(logits(maker), wanted)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"target_modules": ["embed"]}, "embedding"),
        ({"target_modules": ["conv"]}, "convolutions"),
        ({"target_modules": ["attention"]}, "MultiheadAttention|targets"),
        ({"lora_bias": True}, "bias on B"),
        ({"bias": "all"}, "trains biases"),
        ({"modules_to_save": ["other"]}, "as a whole"),
        ({"trainable_token_indices": {"embed": [1]}}, "tokens"),
        ({"target_modules": [], "target_parameters": ["read.weight"]}, "targets a parameter"),
    ],
)
def test_other_training_of_peft_is_refused(more, message):
    peft = pytest.importorskip("peft")
    model = nn.Module()
    model.embed, model.conv = nn.Embedding(5, 4), nn.Conv2d(4, 4, 3)
    model.read, model.other = nn.Linear(4, 4), nn.Linear(4, 4)
    model.attention = nn.MultiheadAttention(4, 2)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**{"target_modules": ["read"], **more}))
    with pytest.raises(EncodeError, match=message) as failure:
        lora_of(wrapped)
    assert "Use " in str(failure.value)


def test_the_active_adapter_of_peft_travels():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["0"])
    model = peft.get_peft_model(nn.Sequential(nn.Linear(4, 4)), config)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["0"]))
    assert lora_of(model)[1]["0"].r == 8
    model.set_adapter("second")
    assert lora_of(model)[1]["0"].r == 2
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(EncodeError, match="2 active"):
        lora_of(model)
