"""The Ray cluster of a benchmark: the consumer starts it, and the one producer joins it."""

from __future__ import annotations

import json
import os
import secrets
import warnings
from typing import Any

import redis

from benchmarks.systems.job import TIMEOUT_S, Job

OBJECT_STORE_BYTES = 2 << 30
TOKEN = secrets.token_hex(16)
"""Guards the cluster that this process starts."""


def start() -> Any:
    """Start a cluster on the loopback interface, unless this process has one; returns `ray`."""
    return _connected(
        TOKEN,
        num_cpus=4,  # places for actors, however many cores there are
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
    )


def invite(client: redis.Redis, job: Job) -> None:
    """Let a producer of this job join the cluster that this process has started."""
    address = start().get_runtime_context().gcs_address
    client.rpush(f"{job.key}:cluster", json.dumps([address, TOKEN]))


def join(client: redis.Redis, job: Job) -> Any:
    """Join the cluster to which the consumer of this job invites; returns `ray`."""
    reply: Any = client.blpop([f"{job.key}:cluster"], timeout=TIMEOUT_S)
    if reply is None:
        raise TimeoutError(f"no Ray cluster within {TIMEOUT_S} s")
    address, token = json.loads(reply[1])
    return _connected(token, address=address)


def _connected(token: str, **options: Any) -> Any:
    """Import Ray, which reads these variables as it is imported, and initialize it once."""
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=token,
        RAY_ENABLE_ZERO_COPY_TORCH_TENSORS="1",
    )
    import ray

    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="ERROR", **options)
        # Nobody writes to the tensors while they are sent.
        warnings.filterwarnings("ignore", message="Zero-copy tensor serialization")
    return ray
