"""The tensors of modules, state dicts and pairs by name, without the names of wrappers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from torch import Tensor, nn

from redrb.errors import EncodeError

_PARTS: Final = ("_orig_mod", "_checkpoint_wrapped_module")
"""Names that wrappers give the wrapped module; other modules do not use such names."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the plain model inside all wrappers; the module itself if it is not wrapped."""
    while (inner := inside(module)) is not None:
        module = inner
    return module


def inside(module: nn.Module) -> nn.Module | None:
    """Return the module that a wrapper wraps; None if `module` is no wrapper."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        found: nn.Module = module.module
        return found
    # not getattr: wrappers pass attributes on, so that it would find those of the wrapped module
    children = list(module.named_children())
    if len(children) != 1 or children[0][0] not in _PARTS:
        return None
    direct = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return None if direct else children[0][1]


def plain_name(name: str) -> str:
    """Return a tensor's or layer's name without the parts that wrappers inside a model add.

    `module`, the part of `DataParallel`, stays, since any module may have that name.
    """
    return ".".join(part for part in name.split(".") if part not in _PARTS)


Models: TypeAlias = nn.Module | Mapping[str, nn.Module]

StateLike: TypeAlias = Models | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]

Target: TypeAlias = Models | Mapping[str, Tensor]

_STATES = "give a module, several by name, a state dict or (name, tensor) pairs"
_NAMED = "give the module, its state dict, or named_parameters()"


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the live parameters and persistent buffers of a module, not copies.

    A wrapped module (`torch.compile`, `DistributedDataParallel` ...) has the plain module's names.
    """
    module = unwrapped(module)
    live = {id(tensor) for tensor in module.parameters()}
    live.update(id(tensor) for tensor in module.buffers())
    found: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in live and found.setdefault(plain_name(name), tensor) is not tensor:
            raise EncodeError(
                f"{name!r} and another tensor are both {plain_name(name)!r} without the parts of "
                "torch.compile and checkpoint wrappers: rename one of the two."
            )
    return found


def models_tensors(models: Models) -> dict[str, Tensor]:
    """Return the live tensors of a module, or of several, named `<model>.<tensor>`."""
    return dict(named_values(models))


def named_values(state: StateLike) -> Iterator[tuple[Any, Any]]:
    """Give the pairs of name and value in a state; a module inside a mapping prefixes its names."""
    if isinstance(state, nn.Module):
        yield from module_tensors(state).items()
        return
    for name, value in state.items() if isinstance(state, Mapping) else _pairs(state):
        if isinstance(value, nn.Module):
            for inner, tensor in module_tensors(value).items():
                yield f"{name}.{inner}", tensor
        else:
            yield name, value


def _pairs(state: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(state, Tensor | str | bytes) or not isinstance(state, Iterable):
        raise EncodeError(f"cannot publish {describe_type(state)}: {_STATES}.")
    for pair in state:
        if isinstance(pair, Tensor):
            raise EncodeError(f"cannot publish tensors without names: {_NAMED}.")
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise EncodeError(f"cannot publish {describe_type(pair)} without a name: {_STATES}.")
        yield pair[0], pair[1]


def describe_type(value: object) -> str:
    """Return a value's type as an error message names it: "a list", "None"."""
    return "None" if value is None else f"a {type(value).__name__}"
