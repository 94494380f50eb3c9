"""`take_mixture`: a mixture that stays open between calls, without an object to hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from redrb.connection import Client
from redrb.errors import ConfigError
from redrb.stream.mixture.lease import MixtureLease
from redrb.stream.mixture.mixture import Mixture
from redrb.stream.mixture.ratio import Ratio


def take_mixture(
    client: Client,
    weights: Mapping[str, float],
    n: int,
    *,
    namespace: str = "default",
    group: str = "default",
    timeout: float | None = None,
    ack: MixtureLease | None = None,
    lease_ms: int = 30_000,
) -> MixtureLease:
    """Lease `n` groups of several tasks together, or none, in ratios that hold exactly.

    The first call opens a `Mixture`, which later calls with the same client and arguments use; it
    lives as long as the client.

    Args:
        client: What `redrb.connect` returned.
        weights: Task -> its share, positive, in any scale.
        n: Groups in the batch.
        namespace, group, lease_ms: As for `Mixture`.
        timeout, ack: As for `Mixture.take`.

    Returns:
        A lease on `n` groups.

    Raises:
        As `Mixture` and `Mixture.take` do.

    Example:
        >>> with redrb.take_mixture(client, {"math": 0.7, "code": 0.3}, 32, timeout=600) as lease:
        ...     train(lease.batch())
    """
    if not isinstance(client, Client):
        raise ConfigError(
            f"the client is a {type(client).__name__}: pass what redrb.connect(url) returns."
        )
    key = (Mixture, namespace, group, Ratio.of(weights).digest, lease_ms)
    mixture = client.opened.get(key)
    if not isinstance(mixture, Mixture):
        # of two threads that come here at once one mixture stays; the other has begun nothing
        made = Mixture(client, weights, namespace=namespace, group=group, lease_ms=lease_ms)
        mixture = client.opened.setdefault(key, made)
    return cast(Mixture, mixture).take(n, timeout=timeout, ack=ack)
