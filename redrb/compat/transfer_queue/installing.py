"""`install`: puts redrb in the place of the package transfer_queue in this process."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from redrb.compat import transfer_queue
from redrb.compat.transfer_queue.process import MARK, NAME, is_installed
from redrb.errors import ConfigError

_VERL = "verl.utils.transferqueue_utils"
"""verl's module that imports transfer_queue, or makes substitutes, before it loads plugins."""


def install() -> ModuleType:
    """Let `import transfer_queue` give redrb's, in this process.

    Modules that have imported TransferQueue already, or verl's substitutes for it, get redrb's
    names in their place: verl imports it before it loads plugins.

    Returns:
        The module that is in sys.modules now.

    Raises:
        ConfigError: TransferQueue is in use in this process.
    """
    if is_installed():
        return sys.modules[NAME]
    interface = sys.modules.get(f"{NAME}.interface")
    if getattr(interface, "_TQ_CLIENT", None) is not None:
        raise ConfigError(
            "TransferQueue is in use in this process already: call install() before "
            "transfer_queue.init()."
        )
    module = ModuleType(NAME, transfer_queue.__doc__)
    names = [name for name in dir(transfer_queue) if name != "install"]
    vars(module).update({name: getattr(transfer_queue, name) for name in names})
    vars(module).update({"__version__": transfer_queue.__version__, "__path__": [], MARK: True})
    _replace(_replaced(module, names))
    for name in [name for name in sys.modules if name.startswith(f"{NAME}.")]:
        del sys.modules[name]
    sys.modules[NAME] = module
    return module


def _replaced(module: ModuleType, names: list[str]) -> dict[int, tuple[Any, Any]]:
    pairs: list[tuple[Any, Any]] = []
    for source in (sys.modules.get(NAME), sys.modules.get(_VERL)):
        pairs.append((source if source is not sys.modules.get(_VERL) else None, module))
        pairs.append((getattr(source, "tq", None), module))
        pairs += [(getattr(source, name, None), getattr(module, name)) for name in names]
    return {id(old): (old, new) for old, new in pairs if old is not None}


def _replace(replaced: dict[int, tuple[Any, Any]]) -> None:
    for holder in list(sys.modules.values()):
        if not isinstance(holder, ModuleType) or holder.__name__.partition(".")[0] == NAME:
            continue
        for name, value in list(vars(holder).items()):
            old, new = replaced.get(id(value), (None, None))
            if old is not None:
                setattr(holder, name, new)
