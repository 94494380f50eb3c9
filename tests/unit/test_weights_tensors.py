"""States, layouts, and the check whether a version fits a model."""

import pytest
import torch
from torch import nn

from redrb.errors import ConfigError, EncodeError, WeightMismatch
from redrb.weights.publishing.publisher import lay_out, published_tensors
from redrb.weights.tensors.dtypes import published_dtype
from redrb.weights.tensors.fitting import check_fits, checked_strict, target_shards
from redrb.weights.tensors.names import models_tensors, module_tensors
from redrb.weights.tensors.state import TensorShard, flat_view, plain
from redrb.weights.tensors.state import load_in_place as load_box
from redrb.weights.wire.layout import CHUNK_BYTES


def whole(tensors):
    return {name: TensorShard.whole(tensor) for name, tensor in tensors.items()}


def load_in_place(values, targets):
    for name, value in values.items():
        load_box(TensorShard.whole(targets[name]), value)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(5))
        self.register_buffer("cache", torch.zeros(9), persistent=False)

    def get_extra_state(self):
        return {"anything": 1}

    def set_extra_state(self, state):
        pass


def layout_of(**tensors):
    return lay_out(tensors, CHUNK_BYTES)


def test_module_gives_its_live_parameters_and_persistent_buffers():
    model = Model()
    found = module_tensors(model)
    assert set(found) == {"embed.weight", "head.weight", "steps"}
    assert found["embed.weight"] is model.embed.weight
    assert found["steps"] is model.steps


def test_tied_tensors_are_stored_once():
    layout = lay_out(module_tensors(Model()), CHUNK_BYTES)
    by_name = {entry.name: entry for entry in layout.tensors}
    assert by_name["head.weight"].alias == "embed.weight"
    assert layout.nbytes == 64 + 64


def test_views_that_read_memory_differently_are_not_tied():
    base = torch.randn(4, 4)
    layout = layout_of(a=base, b=base.t(), c=base[:2], d=torch.empty(0), e=torch.empty(0))
    assert [entry.alias for entry in layout.tensors] == [None] * 5


def test_contiguous_tensors_are_not_copied():
    tensor = torch.randn(100, 100, dtype=torch.bfloat16)
    assert plain(tensor).data_ptr() == tensor.data_ptr()
    assert flat_view(tensor).ctypes.data == tensor.data_ptr()
    assert plain(tensor.t()).is_contiguous()
    assert not plain(torch.zeros(2, dtype=torch.complex64).conj()).is_conj()


def test_tensors_of_several_models_have_their_names_before_theirs():
    models = {"actor": Model(), "critic": nn.Linear(2, 1)}
    found = models_tensors(models)
    assert list(found) == [
        "actor.steps", "actor.embed.weight", "actor.head.weight", "critic.weight", "critic.bias",
    ]  # fmt: skip
    assert list(published_tensors(models)) == list(target_shards(models)) == list(found)
    layout = lay_out(published_tensors(models | {"same": models["actor"]}), CHUNK_BYTES)
    aliases = {entry.name: entry.alias for entry in layout.tensors}
    assert aliases["same.embed.weight"] == "actor.embed.weight"
    assert aliases["same.steps"] == "actor.steps"


def test_floats_are_cast_in_the_layout_and_nothing_else():
    state = {"a": torch.zeros(3), "b": torch.zeros(3).half(), "c": torch.zeros(3, dtype=torch.int8)}
    layout = lay_out(state, CHUNK_BYTES, published_dtype("bfloat16"))
    assert [entry.dtype for entry in layout.tensors] == ["bfloat16", "bfloat16", "int8"]
    assert [entry.offset for entry in layout.tensors] == [0, 64, 128]
    assert published_dtype(None) is None
    with pytest.raises(ConfigError, match="int8"):
        published_dtype("int8")


def test_a_dtype_to_cast_to_may_be_torchs():
    assert published_dtype(torch.bfloat16) is published_dtype("bfloat16") is torch.bfloat16
    for wrong in (torch.int8, torch.bits8, "torch.bfloat16", "fp16", 16, []):
        with pytest.raises(ConfigError, match="bfloat16"):
            published_dtype(wrong)


def test_a_shard_takes_its_box():
    shard = TensorShard(torch.zeros(3, 4), (10, 10), (4, 2))
    full = torch.arange(100.0).reshape(10, 10)
    load_box(shard, full)
    assert torch.equal(shard.tensor, full[4:7, 2:6])


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"a": 1},
        {1: torch.zeros(1)},
        {"": torch.zeros(1)},
        {"\ud800": torch.zeros(1)},
        [("a", torch.zeros(1)), ("a", torch.zeros(1))],
        {"a": torch.zeros(2, 2).to_sparse()},
        {"a": torch.zeros(2, device="meta")},
        {"a": torch.empty(2, dtype=torch.bits8)},
    ],
    ids=[
        "empty",
        "no tensor",
        "no name",
        "no letters",
        "no utf-8",
        "twice",
        "sparse",
        "meta",
        "opaque bits",
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_unpublishable_values_are_refused(state):
    with pytest.raises(EncodeError):
        published_tensors(state)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "cannot publish None: give a module"),
        (7, "cannot publish a int"),
        ("actor", "cannot publish a str"),
        (torch.zeros(2, 2), "cannot publish a Tensor: give a module"),
        (nn.Linear(2, 2).parameters(), r"without names: give .* named_parameters\(\)"),
        ([torch.zeros(2)], "without names"),
        ([nn.Linear(2, 2)], "a Linear without a name: give a module, several by name"),
        (["0.weight"], "a str without a name"),
        ([("a", torch.zeros(1), 2)], "a tuple without a name"),
        ([("a", None)], "'a' is None, not a tensor"),
        ({"model": {"a": torch.zeros(1)}}, "'model' is a dict, not a tensor"),
    ],
)
def test_other_values_than_states_are_refused_with_advice(state, message):
    with pytest.raises(EncodeError, match=message):
        published_tensors(state)


def test_pairs_may_be_lists():
    assert list(published_tensors([["a", torch.zeros(1)]])) == ["a"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ([], "a list"),
        (None, "into None: give a module"),
        (torch.zeros(2), "a Tensor"),
        (nn.Linear(2, 2).parameters(), "a generator: give a module"),
        ({"a": 1}, "a int"),
        ({"a": None}, "'a', None"),
        ({1: torch.zeros(1)}, "names are strings"),
        ({}, "no tensors to load"),
        (nn.Identity(), "no tensors to load"),
        ({"actor": nn.Identity()}, "no tensors to load"),
    ],
)
def test_target_is_a_module_or_a_dict_with_tensors(target, message):
    with pytest.raises(ConfigError, match=message):
        target_shards(target)


@pytest.mark.parametrize("strict", ["foo", "Model", None, 0, 1, 1.0, []])
def test_strict_has_three_values(strict):
    assert [checked_strict(right) for right in (True, False, "model")] == [True, False, "model"]
    with pytest.raises(ConfigError, match='True, False or "model"'):
        checked_strict(strict)
    with pytest.raises(ConfigError, match='True, False or "model"'):
        check_fits(layout_of(a=torch.zeros(1)), whole({"a": torch.zeros(1)}), strict=strict)


def advice(published, own, *, strict=True):
    """Return what is message to do where a model of other names is to be loaded."""
    layout = layout_of(**{name: torch.zeros(1) for name in published})
    with pytest.raises(WeightMismatch, match="Nothing was loaded") as caught:
        check_fits(layout, whole({name: torch.zeros(1) for name in own}), strict=strict)
    return str(caught.value).partition("Nothing was loaded. ")[2]


BOTH = ["actor.0.weight", "actor.0.bias", "critic.weight"]


def test_a_model_that_is_a_part_gets_advice():
    assert 'strict="model"' in advice(["a", "b"], ["b"])
    assert 'strict="model"' in advice(BOTH, ["actor.0.bias", "actor.0.weight"])
    for more in (advice(["a", "b"], ["b", "c"]), advice(["a"], ["a", "c"])):
        assert more == "Publish the same model, or load what both have with strict=False."
    assert advice(["a"], ["c"]) == advice(["a"], ["c"], strict=False) == "Publish the same model."


@pytest.mark.parametrize("strict", [True, "model", False])
def test_a_common_prefix_is_named(strict):
    message = advice(BOTH, ["0.weight", "0.bias"], strict=strict)
    assert "published names begin with 'actor.'" in message
    assert '{"actor": model}' in message
    assert ('strict="model"' in message) == (strict is True)
    assert "'a.' or 'b.'" in advice(["a.x", "b.x"], ["x"], strict=strict)
    message = advice(["0.weight"], ["module.0.weight", "module.1.weight"], strict=strict)
    assert "model's names begin with 'module.'" in message


def test_other_tensors_cannot_be_left_out_by_strict():
    layout = layout_of(a=torch.zeros(2), b=torch.zeros(2))
    with pytest.raises(WeightMismatch, match="shapes must be equal") as caught:
        check_fits(layout, whole({"a": torch.zeros(3)}), strict=True)
    assert "strict=" not in str(caught.value)


def test_a_model_without_memory_is_to_get_some_first():
    model = nn.Linear(2, 1, device="meta")
    for tensors in ({"weight": torch.zeros(1, 2), "bias": torch.zeros(1)}, {"a": torch.zeros(1)}):
        with pytest.raises(WeightMismatch, match=r"model\.to_empty\(device=\.\.\.\)") as caught:
            check_fits(lay_out(tensors, CHUNK_BYTES), target_shards(model), strict=True)
        assert "shapes must be equal" not in str(caught.value)
        assert ("Publish the same model" in str(caught.value)) == ("a" in tensors)


def test_mismatch_lists_all_that_is_wrong():
    layout = layout_of(a=torch.zeros(2), b=torch.zeros(3), c=torch.zeros(1, dtype=torch.int64))
    targets = {"a": torch.zeros(4), "c": torch.zeros(1), "d": torch.zeros(1)}
    with pytest.raises(WeightMismatch) as caught:
        check_fits(layout, whole(targets), strict=True)
    message = str(caught.value)
    assert "in the model but not published: d" in message
    assert "published but not in the model: b" in message
    assert "a (published float32[2], model float32[4])" in message
    assert "c (published int64[1], model float32[1])" in message


def test_long_lists_are_cut():
    layout = layout_of(**{f"t{i}": torch.zeros(1) for i in range(50)})
    with pytest.raises(WeightMismatch, match="t4 and 45 more"):
        check_fits(layout, {}, strict=True)


def test_without_strict_names_may_differ_but_not_shapes():
    layout = layout_of(a=torch.zeros(2), b=torch.zeros(3))
    assert check_fits(layout, whole({"b": torch.zeros(3), "c": torch.zeros(1)}), strict=False) == [
        "b"
    ]
    with pytest.raises(WeightMismatch, match="no name in common"):
        check_fits(layout, whole({"c": torch.zeros(1)}), strict=False)
    with pytest.raises(WeightMismatch, match="different"):
        check_fits(layout, whole({"b": torch.zeros(4)}), strict=False)


def test_all_names_of_the_model_must_be_published():
    layout = layout_of(a=torch.zeros(2), b=torch.zeros(3))
    assert check_fits(layout, whole({"b": torch.zeros(3)}), strict="model") == ["b"]
    with pytest.raises(WeightMismatch, match="not published: c"):
        check_fits(layout, whole({"b": torch.zeros(3), "c": torch.zeros(1)}), strict="model")


def test_a_shard_fits_by_the_shape_of_the_whole():
    layout = layout_of(a=torch.zeros(4, 6))
    fits = TensorShard(torch.zeros(2, 6), (4, 6), (2, 0))
    assert check_fits(layout, {"a": fits}, strict=True) == ["a"]
    with pytest.raises(WeightMismatch):
        check_fits(layout, {"a": TensorShard(torch.zeros(2, 6), (8, 6), (2, 0))}, strict=True)


@pytest.mark.parametrize(
    "target",
    [torch.zeros(1).expand(2), torch.zeros(2, device="meta"), torch.zeros(2).to_sparse()],
    ids=["expanded", "meta", "sparse"],
)
@pytest.mark.filterwarnings("ignore")
def test_targets_that_cannot_be_written_whole_are_refused(target):
    with pytest.raises(WeightMismatch):
        check_fits(layout_of(a=torch.zeros(2)), whole({"a": target}), strict=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floats_are_cast_into_each_other(dtype):
    value, target = torch.tensor([1.5, -2.0], dtype=torch.bfloat16), torch.zeros(2, dtype=dtype)
    assert check_fits(layout_of(a=value), whole({"a": target}), strict=True) == ["a"]
    load_in_place({"a": value}, {"a": target})
    assert target.tolist() == [1.5, -2.0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.complex64])
def test_other_dtypes_are_not_cast(dtype):
    with pytest.raises(WeightMismatch, match="different"):
        check_fits(
            layout_of(a=torch.zeros(2)), whole({"a": torch.zeros(2, dtype=dtype)}), strict=True
        )


def test_loading_writes_into_the_same_memory_and_autograd_knows():
    parameter = nn.Parameter(torch.zeros(3))
    strided = torch.zeros(3, 2).t()
    with torch.inference_mode():
        inference = torch.zeros(2)
    places = [parameter.data_ptr(), strided.data_ptr(), inference.data_ptr()]
    loss = (parameter * parameter).sum()
    values = {"p": torch.ones(3), "s": torch.ones(2, 3), "i": torch.ones(2)}
    load_in_place(values, {"p": parameter, "s": strided, "i": inference})
    assert [t.sum().item() for t in (parameter, strided, inference)] == [3, 6, 2]
    assert [parameter.data_ptr(), strided.data_ptr(), inference.data_ptr()] == places
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_conjugated_targets_are_written():
    target = torch.zeros(2, dtype=torch.complex64).conj()
    load_in_place({"a": torch.tensor([1 + 2j, 3 - 1j])}, {"a": target})
    assert target.tolist() == [1 + 2j, 3 - 1j]
