"""Which kernel runs: a core that is there and cannot be used is no silent loss of speed."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType

import pytest

from redrb.cli.__main__ import main
from redrb.codec import kernels

CORE = "redrb.codec._core"


def installed(patch: pytest.MonkeyPatch, interface: int) -> ModuleType:
    found = ModuleType(CORE)
    found.INTERFACE = interface
    patch.setitem(sys.modules, CORE, found)
    return found


def test_a_core_of_this_interface_runs(monkeypatch):
    found = installed(monkeypatch, kernels.INTERFACE)
    assert kernels.load() == (found, "compiled")


def test_a_core_of_another_interface_is_named_and_warned_of(monkeypatch, capsys):
    installed(monkeypatch, kernels.INTERFACE - 1)
    with pytest.warns(
        RuntimeWarning, match=rf"plain Python.*interface {kernels.INTERFACE - 1}.*Reinstall redrb"
    ):
        found, name = kernels.load()
    assert found is None
    reason = f"because the compiled core has interface {kernels.INTERFACE - 1}"
    assert name.startswith(f"plain Python, {reason}")
    monkeypatch.setattr(kernels, "NAME", name)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert "reinstall redrb" in capsys.readouterr().out


def test_a_core_that_cannot_be_loaded_is_named_and_warned_of(monkeypatch):
    def refuse(_):
        raise ImportError("undefined symbol: PyCapsule_New")

    monkeypatch.setattr(kernels, "import_module", refuse)
    with pytest.warns(RuntimeWarning, match="undefined symbol"):
        found, name = kernels.load()
    assert found is None
    assert "undefined symbol" in name


def test_without_a_core_the_plain_kernel_runs_silently(monkeypatch):
    def miss(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(kernels, "import_module", miss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.load() == (None, "plain Python")
