"""Wrappers that torch puts around models: left out, so that a model has its names with or without.

They are those of `torch.compile`, `DataParallel`, `DistributedDataParallel` and of activation
checkpointing (`checkpoint_wrapper`).
"""

from __future__ import annotations

from typing import Final

from torch import nn

_PARTS: Final = ("_orig_mod", "_checkpoint_wrapped_module")
"""What wrappers call the module that they are around, where no other module has such a name."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model that wrappers are around, through all of them; itself where there is none.

    It is the same module, with the same parameters.
    """
    while (inner := inside(module)) is not None:
        module = inner
    return module


def inside(module: nn.Module) -> nn.Module | None:
    """Return the module that a wrapper is around; None where `module` is no wrapper."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        found: nn.Module = module.module
        return found
    # not getattr: wrappers pass on what they have not, so those inside would be found too
    children = list(module.named_children())
    if len(children) != 1 or children[0][0] not in _PARTS:
        return None
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return None if own else children[0][1]


def plain_name(name: str) -> str:
    """Return a tensor's or layer's name without the parts that wrappers inside a model put there.

    `DataParallel`'s `module` stays, which may be the name of anything.
    """
    return ".".join(part for part in name.split(".") if part not in _PARTS)
