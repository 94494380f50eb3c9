"""`Replication`: a request whose reply counts only when replicas have received its writes."""

from __future__ import annotations

from redrb.connection.failures import NotReplicated
from redrb.connection.transport import Pipeline, Reply

_REPLICATION_MS = 1000
"""Longest wait of an attempt for replicas; then it is repeated, which stores nothing twice."""

_ON_REPLICA = "WAIT cannot be used with replica instances"
"""The reply of a primary that a failover made a replica between the write and this command."""


class Replication:
    """Lets the server wait for replicas, in the same round trip."""

    def __init__(self, min_replicas: int) -> None:
        """Note the number of replicas that must confirm a request; 0: no command is added."""
        self.min_replicas = min_replicas

    def add_to(self, pipeline: Pipeline) -> None:
        """Add the command that waits for replicas, after those that write."""
        if self.min_replicas:
            pipeline.add("WAIT", self.min_replicas, _REPLICATION_MS)

    def divide(self, replies: list[Reply]) -> tuple[list[Reply], Reply]:
        """Return the other replies, and the number of replicas that confirmed them."""
        if not self.min_replicas:
            return replies, 0
        return replies[:-1], replies[-1]

    def check(self, confirmed: Reply) -> None:
        """Raise a transient error if too few replicas have confirmed the request."""
        if isinstance(confirmed, Exception):
            if _ON_REPLICA in str(confirmed):
                raise NotReplicated(
                    "it became a replica before a replica (min_replicas) had confirmed it"
                ) from confirmed
            raise confirmed
        if confirmed < self.min_replicas:
            raise NotReplicated(
                f"only {confirmed} of {self.min_replicas} replicas (min_replicas) have confirmed "
                "it in time"
            )
