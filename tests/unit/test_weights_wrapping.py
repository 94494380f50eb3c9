"""Wrapped models have the names of plain ones, for publishers and readers."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from redrb.errors import EncodeError
from redrb.weights.publishing.publisher import published_tensors
from redrb.weights.tensors.fitting import target_shards
from redrb.weights.tensors.names import (
    inside,
    models_tensors,
    module_tensors,
    plain_name,
    unwrapped,
)


def compiled(module: nn.Module) -> nn.Module:
    """Return a module that would be compiled when it is called."""
    wrapped: nn.Module = torch.compile(module, backend="eager")
    return wrapped


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


WRAPPERS = {
    "compiled": compiled,
    "data parallel": nn.DataParallel,
    "checkpointed": checkpoint_wrapper,
    "compiled, then data parallel": lambda module: nn.DataParallel(compiled(module)),
    "data parallel, then compiled": lambda module: compiled(nn.DataParallel(module)),
    "all": lambda module: checkpoint_wrapper(nn.DataParallel(compiled(checkpoint_wrapper(module)))),
}


def check_same(wrapped: nn.Module, model: nn.Module) -> None:
    """Check that names are those of `model`, and tensors the very same."""
    wanted = module_tensors(model)
    assert list(wanted) == [
        *("0.weight", "0.bias", "1.weight", "1.bias"),
        *("1.running_mean", "1.running_var", "1.num_batches_tracked"),
    ]
    found = module_tensors(wrapped)
    assert list(found) == list(wanted)
    assert all(found[name] is tensor for name, tensor in wanted.items())
    several = models_tensors({"actor": wrapped})
    assert all(several[f"actor.{name}"] is tensor for name, tensor in wanted.items())
    targets = {name: shard.tensor for name, shard in target_shards(wrapped).items()}
    for tensors in (published_tensors(wrapped), targets):
        assert tensors.keys() == wanted.keys()
        assert all(tensors[name] is tensor for name, tensor in wanted.items())
    assert list(published_tensors({"a": wrapped})) == [f"a.{name}" for name in wanted]
    assert list(published_tensors([("a", wrapped)])) == [f"a.{name}" for name in wanted]


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_a_wrapped_model_is_the_plain_one(wrap):
    model = plain()
    wrapped = wrap(model)
    assert unwrapped(wrapped) is model
    assert unwrapped(model) is model
    check_same(wrapped, model)


@pytest.mark.parametrize("wrap", [compiled, checkpoint_wrapper])
def test_wrapped_parts_have_the_names_of_plain_ones(wrap):
    model = plain()
    check_same(nn.Sequential(wrap(model[0]), wrap(checkpoint_wrapper(model[1]))), model)
    check_same(compiled(nn.Sequential(wrap(model[0]), wrap(model[1]))), model)


@pytest.fixture
def group(tmp_path):
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_model_of_a_data_parallel_rank_is_the_plain_one():
    model = plain()
    check_same(nn.parallel.DistributedDataParallel(model), model)
    check_same(compiled(nn.parallel.DistributedDataParallel(compiled(model))), model)


class Odd(nn.Module):
    """Has a part that is named as if it were compiled, and tensors beside it."""

    def __init__(self, same: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self._orig_mod = nn.Module()
        self._orig_mod.weight = self.weight if same else nn.Parameter(torch.zeros(2))


def test_two_names_that_would_be_one_are_refused():
    assert inside(Odd(same=False)) is None
    for of in (module_tensors, published_tensors, target_shards):
        with pytest.raises(EncodeError, match="both 'weight'"):
            of(Odd(same=False))
        assert list(of(Odd(same=True))) == ["weight"]


def test_names_in_dicts_and_pairs_stay_as_they_are():
    state = compiled(nn.Linear(2, 1)).state_dict()
    names = ["_orig_mod.weight", "_orig_mod.bias"]
    assert list(state) == names
    for found in (published_tensors(state), published_tensors(state.items()), target_shards(state)):
        assert list(found) == names
    module = nn.Module()
    module.module = nn.Linear(2, 1)
    assert list(published_tensors(module)) == ["module.weight", "module.bias"]


def test_only_the_parts_of_wrappers_leave_a_name():
    assert plain_name("a._orig_mod.0._checkpoint_wrapped_module.weight") == "a.0.weight"
    assert plain_name("my_orig_mod.module.weight") == "my_orig_mod.module.weight"
    assert plain_name("_orig_mod") == plain_name("") == ""
