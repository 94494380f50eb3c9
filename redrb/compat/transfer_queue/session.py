"""`init` and `close`: the run that this process has begun or joined."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from redrb import environment
from redrb.compat.transfer_queue import guard as guards
from redrb.compat.transfer_queue.queue import Queue, durability
from redrb.connection import connect
from redrb.errors import ConfigError
from redrb.words import counted

_log = logging.getLogger("redrb")
_lock = threading.Lock()
_queue: Queue | None = None

_HELD = {"backend.storage_backend": "SimpleStorage", "controller.sampler": "SequentialSampler"}
"""Settings of TransferQueue that are refused with other values than its defaults."""


def init(conf: Any = None) -> Any:
    """Begin a run in the driver, or join it in other processes.

    With Ray the first process of a job that calls it is the driver, as with TransferQueue. Without
    Ray it is a process that gives `conf`, or the first one of a namespace.

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
            _open(lambda queue: conf is not None or guards.has_ray() or not queue.join())
    return conf


def opened() -> Queue:
    """Return the run of this process, which joins the current one if it has not yet."""
    with _lock:
        return _queue or _open(lambda _: False)


def _open(begins: Callable[[Queue], bool]) -> Queue:
    """Connect, and join the run of the driver; where there is no driver, begin one or not."""
    global _queue
    with ExitStack() as opening:
        client = opening.enter_context(connect())
        namespace = environment.variable("REDRB_NAMESPACE") or "default"
        queue = Queue(client, namespace, environment.variable("REDRB_SECRET"))
        driver = guards.find()
        if driver is None and begins(queue):
            _begin(queue)
        else:
            _join(queue, driver)
        opening.pop_all()
        _queue = queue
    return queue


def _begin(queue: Queue) -> None:
    cleared = queue.begin()
    queue.guard = guards.place(queue.run, queue.where)
    brings = (
        f" Cleared {counted(cleared, 'row')} of an earlier run; load_checkpoint brings them back."
    )
    _log.warning(  # verl shows no INFO, and this line proves that the plugin was loaded
        "transfer_queue is redrb at %s. %s%s",
        queue.where,
        durability(queue.client),
        brings if cleared else "",
    )


def _join(queue: Queue, driver: tuple[str, str] | None) -> None:
    advice = "set the same REDRB_URL and REDRB_NAMESPACE in the environment of every process."
    run = queue.join()
    if driver is not None and driver[0] != run:
        raise ConfigError(
            f"the driver of this run keeps its rows at {driver[1]}, and this process looks at "
            f"{queue.where}, where there is another run or none: {advice}"
        )
    if not run:
        raise ConfigError(
            f"no run has begun at {queue.where}: call transfer_queue.init() in the driver first, "
            f"and {advice}"
        )


def close() -> None:
    """Close the connection of this process. The rows stay in Redis."""
    global _queue
    with _lock:
        if _queue is not None:
            guards.end(_queue.guard)
            _queue.client.close()
        _queue = None


def get_metrics_endpoint() -> str | None:
    """Return None: Prometheus asks `redrb exporter` (docs/how-to/prometheus.md)."""
    return None
