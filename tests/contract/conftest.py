"""Fixtures of several contract tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import redrb
from tests.published import CHUNK_BYTES


@pytest.fixture
def publisher(client: redrb.Client, namespace: str) -> redrb.WeightPublisher:
    return redrb.WeightPublisher(client, "actor", namespace=namespace)


@pytest.fixture
def subscriber(client: redrb.Client, namespace: str) -> redrb.WeightSubscriber:
    return redrb.WeightSubscriber(client, "actor", namespace=namespace)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few kilobytes of weights have several chunks."""
    monkeypatch.setattr(CHUNK_BYTES, 1024)


@pytest.fixture
def scope() -> Iterator[ExitStack]:
    """What a test enters here is left at its end."""
    with ExitStack() as scope:
        yield scope
