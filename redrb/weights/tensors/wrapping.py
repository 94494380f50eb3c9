"""Wrappers around models, and names without them, so that wrapped and plain models agree.

Known are the wrappers of `torch.compile`, `DataParallel`, `DistributedDataParallel` and activation
checkpointing (`checkpoint_wrapper`).
"""

from __future__ import annotations

from typing import Final

from torch import nn

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
