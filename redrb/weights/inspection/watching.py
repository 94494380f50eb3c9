"""New versions, as they are committed: `redrb weights watch`."""

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

    Versions that are deleted before they are read are left out.

    Args:
        client: From `redrb.connect`.
        name: Name of the weights, of which there may be no version yet.
        newer_than: Yield versions larger than this.
        namespace: Namespace of the publisher.
        timeout: Seconds to wait for each version; None waits for ever.

    Raises:
        WeightTimeout: No version came in time.
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
