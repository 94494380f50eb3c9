"""One stream of experience over several tasks, which lie on different nodes of a cluster."""

from redrb.stream.sharded.sharded import ShardedStream

__all__ = ["ShardedStream"]
