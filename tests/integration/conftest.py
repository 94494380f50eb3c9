"""Fixtures of tests that run commands in this process, on a real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest

import redrb
from redrb.cli import main
from redrb.connection import Client

Run: TypeAlias = Callable[..., tuple[int, str, str]]
"""Runs a command of redrb; returns its exit status, output and errors."""


@pytest.fixture
def store(real_url: str) -> Iterator[Client]:
    """A client of each real server in turn."""
    with redrb.connect(real_url) as client:
        yield client


@pytest.fixture
def run(
    store: Client,
    namespace: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Run a command on the server and namespace of the test."""
    monkeypatch.setenv("REDRB_URL", store.url)

    def run(*arguments: object) -> tuple[int, str, str]:
        status = main([*map(str, arguments), "--namespace", namespace])
        return status, *capsys.readouterr()

    return run
