"""Fixtures of tests that run commands in this process, on a real server."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import pytest

import redrb
from redrb.cli.__main__ import main
from redrb.connection import Client
from tests.dashboards import Dashboard

Run: TypeAlias = Callable[..., tuple[int, str, str]]
"""Runs a command of redrb; returns its exit status, output and errors."""

LogIn: TypeAlias = Callable[..., Client]
"""Makes a user with the rights of a role, and returns its client."""

SECRET = "c0rrect-horse"


@pytest.fixture
def store(real_url: str) -> Iterator[Client]:
    """A client of each real server in turn."""
    with redrb.connect(real_url) as client:
        yield client


@pytest.fixture
def dashboard(real_url: str, namespace: str) -> Iterator[Dashboard]:
    """A dashboard of the test's namespace, in a process of its own."""
    started = Dashboard(real_url, namespace)
    yield started
    started.close()


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


@pytest.fixture
def log_in(
    real_url: str, store: Client, namespace: str, capsys: pytest.CaptureFixture[str]
) -> Iterator[LogIn]:
    """Make a user with the rights of a role, and return its client."""
    opened: dict[str, Client] = {}

    def make(
        role: str, *more: str, tasks: Sequence[str] = ("math",), weights: str = "policy"
    ) -> Client:
        user = f"{role}{len(opened)}-{namespace}"
        if role == "weight-reader":
            named = ["--weights", weights]
        else:
            named = [word for task in tasks for word in ("--task", task)]
            named += ["--weights", weights] if tasks else []
        arguments = ["--role", role, *named, *more, "--namespace", namespace, "--user", user]
        assert main(["acl", *arguments]) == 0
        store.execute(*shlex.split(capsys.readouterr().out), f">{SECRET}")
        place = real_url.removeprefix("redis://")
        opened[user] = redrb.connect(f"redis://{user}:{SECRET}@{place}", retry_s=2)
        return opened[user]

    yield make
    for client in opened.values():
        client.close()
    if opened:
        store.execute("ACL", "DELUSER", *opened)
