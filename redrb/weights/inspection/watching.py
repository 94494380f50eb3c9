"""New versions, as they are committed: `redrb weights watch`."""

from __future__ import annotations

from collections.abc import Iterator

from redrb.checks import checked_timeout
from redrb.connection import Client
from redrb.weights.inspection.listing import catalogue_of
from redrb.weights.reading.version_wait import wait_for_version
from redrb.weights.wire.manifest import WeightVersion


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
        ConfigError: `timeout` is no number of seconds.
        WeightTimeout: No version came in time.
        StoreUnavailable: Redis stayed away.
    """
    catalogue = catalogue_of(client, name, namespace)
    seconds = checked_timeout(timeout)
    last = newer_than
    while True:
        found = wait_for_version(catalogue, last, seconds, larger=True)
        versions = [version for version in catalogue.kept() if version.version > last]
        for version in versions or [found]:
            yield version
            last = version.version
