"""With Ray, a named actor tells each process that redrb holds the rows of the run, and where.

It has the name of TransferQueue's controller, which TransferQueue looks for in `init`. So a process
that uses TransferQueue itself, because it did not load the plugin, gets an error there; without the
actor it would start a queue of its own in memory, and the run would wait for ever.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from redrb.compat.transfer_queue.process import NAME, SWITCH
from redrb.errors import ConfigError

_ACTOR = "TransferQueueController"

ANSWER_S = 120.0
"""Longest wait for the actor: its process may have to start."""


class Guard:
    """The actor of a run: its random name, and its server, without password."""

    def __init__(self, run: str, where: str) -> None:
        self._run, self._where = run, where

    def run(self) -> tuple[str, str]:
        """Return the run and its server."""
        return self._run, self._where

    def get_config(self) -> NoReturn:
        """Refuse TransferQueue, which calls this first."""
        raise ConfigError(
            f"this run keeps its rows in redrb at {self._where}, but this process uses "
            f"TransferQueue. Set {SWITCH}=1 and REDRB_URL in the environment of every process."
        )


def has_ray() -> bool:
    """Return whether this process is connected to a Ray cluster."""
    return _ray() is not None


def find() -> tuple[str, str] | None:
    """Return the run of the actor and its server; None without Ray, and where no run has begun.

    Raises:
        ConfigError: The driver uses TransferQueue.
    """
    ray = _ray()
    if ray is None:
        return None
    try:
        guard = ray.get_actor(_ACTOR, namespace=NAME)
    except ValueError:
        return None
    if not hasattr(guard, "run"):
        raise ConfigError(
            f"the driver of this run uses TransferQueue, and this process redrb: set {SWITCH}=1 "
            "and REDRB_URL in the driver's environment, too."
        )
    try:
        return _asked(ray, guard)
    except ray.exceptions.RayActorError:  # it ends with its driver
        return None


def place(run: str, where: str) -> Any:
    """Start the actor, which ends with its handle; returns the handle, None without Ray."""
    ray = _ray()
    if ray is None:
        return None
    options = {"name": _ACTOR, "namespace": NAME, "num_cpus": 0}
    guard = ray.remote(Guard).options(**options).remote(run, where)
    _asked(ray, guard)
    return guard


def _asked(ray: Any, guard: Any) -> tuple[str, str]:
    """Return the run and its server, which the actor tells."""
    try:
        run, where = ray.get(guard.run.remote(), timeout=ANSWER_S)
    except ray.exceptions.GetTimeoutError as error:
        raise ConfigError(
            f"Ray did not start or reach the actor {_ACTOR} in {ANSWER_S:.0f} s: look at `ray "
            "status` for nodes that are away or have no room for an actor."
        ) from error
    return run, where


def end(guard: Any) -> None:
    """End the actor that `place` has started."""
    ray = _ray()
    if ray is not None and guard is not None:
        ray.kill(guard)


def _ray() -> Any:
    ray: Any = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None
