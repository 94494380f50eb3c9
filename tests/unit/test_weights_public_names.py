"""The names of `redrb.weights`: each loads at its first use and is documented."""

from __future__ import annotations

import subprocess
import sys

import pytest

import redrb.weights


@pytest.mark.parametrize("name", redrb.weights.__all__)
def test_each_public_name_loads_and_is_documented(name: str) -> None:
    assert getattr(redrb.weights, name).__doc__


def test_importing_the_package_imports_neither_torch_nor_redis() -> None:
    program = "import redrb.weights, sys; print(*sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert {"torch", "numpy", "redis"}.isdisjoint(printed.stdout.split())
