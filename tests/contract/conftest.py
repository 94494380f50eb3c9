"""Fixtures of several contract tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import redrb
from redrb.connection import deadline
from tests.clusters import RedisCluster
from tests.conftest import REAL
from tests.published import CHUNK_BYTES
from tests.table_audit import audit_table


@pytest.fixture(autouse=True)
def time_for_pages() -> Iterator[None]:
    """Let a call that need not wait do the pages before it, however busy the machine is.

    Tests say how much a call does, and not within how many milliseconds; those that are about the
    time set `PAGES_S` themselves.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deadline, "PAGES_S", 10.0)
        yield


@pytest.fixture(params=list(REAL))
def cluster(
    request: pytest.FixtureRequest, clusters: Callable[[str], RedisCluster]
) -> RedisCluster:
    """The cluster of each real server in turn."""
    return clusters(request.param)


@pytest.fixture
def make(client: redrb.Client, namespace: str) -> Callable[..., redrb.WeightPublisher]:
    """Make publishers of the same weights with other options."""
    return lambda **options: redrb.WeightPublisher(client, "actor", namespace=namespace, **options)


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


@pytest.fixture
def open_table(client: redrb.Client, namespace: str) -> Iterator[Callable[..., redrb.Table]]:
    """Open the same table several times; it is audited at the end."""
    opened: list[redrb.Table] = []

    def open_it(**settings: Any) -> redrb.Table:
        opened.append(redrb.Table(client, "train", namespace=namespace, **settings))
        return opened[-1]

    yield open_it
    if opened and opened[-1]._index.client.execute("EXISTS", opened[-1]._index.keys.task):
        audit_table(client, opened[-1])
