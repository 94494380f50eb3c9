"""A plugin of pytest: stand-ins for packages that slime and miles import and do not need here.

They are found last, where such a package is not installed, and have any content.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

_PACKAGES = ("pybase64", "pylatexenc", "ray", "sglang", "sglang_router", "torchvision")


class _StandIns:
    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        found = name.split(".")[0] in _PACKAGES
        return ModuleSpec(name, self, is_package=True) if found else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: Any = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__version__ = [], spec, "0"
        return module  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_StandIns())  # type: ignore[arg-type]
