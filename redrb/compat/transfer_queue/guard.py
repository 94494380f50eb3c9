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


class Guard:
    """The actor.

    Args:
        run: Random name of the run.
        where: The server, without its password.
    """

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


def find() -> Any:
    """Return the actor of the run, or None if there is none or this process does not use Ray."""
    ray = _ray()
    if ray is None:
        return None
    try:
        return ray.get_actor(_ACTOR, namespace=NAME)
    except ValueError:
        return None


def place(run: str, where: str) -> Any:
    """Start the actor, which ends with its handle; returns the handle, None without Ray."""
    ray = _ray()
    if ray is None:
        return None
    options = {"name": _ACTOR, "namespace": NAME, "num_cpus": 0}
    guard = ray.remote(Guard).options(**options).remote(run, where)
    ray.get(guard.run.remote())
    return guard


def end(guard: Any) -> None:
    """End the actor that `place` has started."""
    ray = _ray()
    if ray is not None and guard is not None:
        ray.kill(guard)


def check(guard: Any, run: str, where: str) -> None:
    """Check that this process sees the run of the actor.

    Raises:
        ConfigError: The driver uses TransferQueue, or another server or namespace.
    """
    if not hasattr(guard, "run"):
        raise ConfigError(
            f"the driver of this run uses TransferQueue, and this process redrb: set {SWITCH}=1 "
            "and REDRB_URL in the driver's environment, too."
        )
    theirs, place = sys.modules["ray"].get(guard.run.remote())
    if theirs != run:
        raise ConfigError(
            f"the driver of this run keeps its rows at {place}, and this process looks at {where}, "
            "where there is another run or none: set the same REDRB_URL and REDRB_NAMESPACE in the "
            "environment of every process."
        )


def _ray() -> Any:
    """Return the package ray where this process is connected to a cluster of it."""
    ray: Any = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None
