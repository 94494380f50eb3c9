"""Versions as they are committed."""

from __future__ import annotations

from collections.abc import Iterator

from redrb.connection import Client
from redrb.weights import WeightSubscriber, WeightVersion


def new_versions(
    client: Client,
    name: str,
    newer_than: int,
    *,
    namespace: str = "default",
    timeout: float | None = None,
) -> Iterator[WeightVersion]:
    """Yield each version as it is committed; waits without polling.

    Of versions that follow each other faster than they are read, those that are deleted meanwhile
    are left out.

    Args:
        client: From `redrb.connect`.
        name: Name of the weights; nothing need be published yet.
        newer_than: Of versions larger than this.
        namespace: That of the publisher.
        timeout: Seconds for the next one to come; None waits for ever.

    Raises:
        WeightTimeout: None came in time.
        StoreUnavailable: Redis stayed away.
    """
    subscriber = WeightSubscriber(client, name, namespace=namespace)
    last = newer_than
    while True:
        found = subscriber.wait(last, timeout=timeout)
        versions = [version for version in subscriber.versions() if version.version > last]
        for version in versions or [found]:
            yield version
            last = version.version
