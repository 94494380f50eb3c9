"""`init` and `close`: the run that this process has begun or joined."""

from __future__ import annotations

import logging
import threading
from typing import Any

from redrb import environment
from redrb.compat.transfer_queue import guard as guards
from redrb.compat.transfer_queue.queue import Queue, durability
from redrb.connection import connect
from redrb.errors import ConfigError

_log = logging.getLogger("redrb")
_lock = threading.Lock()
_queue: Queue | None = None

_HELD = {"backend.storage_backend": "SimpleStorage", "controller.sampler": "SequentialSampler"}
"""Settings of TransferQueue that are refused with other values than its defaults."""


def init(conf: Any = None) -> Any:
    """Begin a run, or join it: the first process with Ray, or each call with `conf` without Ray.

    The URL is that of REDRB_URL, the namespace that of REDRB_NAMESPACE. A new run begins empty:
    the rows of an earlier one are cleared, until `load_checkpoint` brings them back, and writers of
    earlier runs are refused. One log line says where the rows are and what a crash loses.

    Args:
        conf: TransferQueue's settings. Sizes and ports have no meaning here; other storage backends
            and samplers are refused.

    Returns:
        `conf`.

    Raises:
        ConfigError: There is no URL, or this process would not see the rows of its run.
        StoreUnavailable: No server answers.
    """
    for path, default in _HELD.items():
        section, name = path.split(".")
        chosen = ((conf or {}).get(section) or {}).get(name, default)
        if chosen != default:
            raise ConfigError(
                f"transfer_queue.{path} is {chosen!r:.80}: with redrb the rows are in Redis, and "
                "verl's replay buffer samples. Remove this setting."
            )
    with _lock:
        if _queue is None:
            _open(begins=None if conf is None else True)
    return conf


def _open(*, begins: bool | None) -> Queue:
    """Connect, and begin a run or join one; None: begin the first one only."""
    global _queue
    client = connect()
    namespace = environment.variable("REDRB_NAMESPACE", "default") or "default"
    queue = Queue(client, namespace, environment.variable("REDRB_SECRET"))
    guard, run = guards.find(), queue.run
    if guard is not None:
        guards.check(guard, run, queue.where)
    elif begins or (begins is None and not run):
        cleared = queue.begin()
        queue.guard = guards.place(queue.run, queue.where)
        _log.warning(  # verl shows no INFO, and this line proves that the plugin was loaded
            "transfer_queue is redrb at %s. %s%s",
            queue.where,
            durability(client),
            f" {cleared} rows of an earlier run were cleared; load_checkpoint brings them back."
            if cleared
            else "",
        )
    elif not run:
        raise ConfigError(
            f"no run has begun at {queue.where}: call transfer_queue.init() in the driver first, "
            "and set the same REDRB_URL and REDRB_NAMESPACE in the environment of every process."
        )
    _queue = queue
    return queue


def opened() -> Queue:
    """Return the run of this process, which joins the current one if it has not yet."""
    with _lock:
        return _queue or _open(begins=False)


def close() -> None:
    """Close the connection of this process. The rows stay in Redis."""
    global _queue
    with _lock:
        if _queue is not None:
            guards.end(_queue.guard)
            _queue.client.close()
        _queue = None


def get_metrics_endpoint() -> str | None:
    """Return None: Prometheus gets redrb's metrics from `redrb exporter` (docs/metrics.md)."""
    return None
