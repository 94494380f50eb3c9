"""The systems that the benchmarks compare, a module each.

Every module has three functions. `produce(job)` and `consume(job)` run in spawned processes; they
put `job.groups` groups of the shape, and take them as padded batches of tensors. `version()` names
the system's version, and raises ImportError if the system is not installed.
"""

from __future__ import annotations

import importlib

from benchmarks.systems.job import TIMEOUT_S, Job

OURS = ("redrb", "raw", "packed")
"""redrb and its floors; their processes are shared from round to round."""

PEERS = ("torchrl", "transfer_queue", "ray_queue", "pipelinerl", "rocket_learn")
"""Other systems, which run where they are installed."""

AFTER_A_TAKE = {
    "redrb": "leased, then acknowledged and deleted; what a dead consumer held is taken again",
    "raw": "XACK and XDEL of the batch; nothing is decoded or padded",
    "packed": "XACK and XDEL of the batch; nothing is decoded or padded",
    "torchrl": "its rows are free for other samples; nothing is acknowledged",
    "transfer_queue": "marked as consumed as it is asked for; deleted after the clock stopped",
    "ray_queue": "removed as it is taken, from memory of an actor; nothing is acknowledged",
    "pipelinerl": "nothing is acknowledged or deleted; a reader that restarts begins at the first",
    "rocket_learn": "removed as it is taken; nothing is acknowledged",
}
"""What each system does with a batch that was taken: they do not all do the same work."""

INSTALL = "pip install -c constraints.txt '.[bench]'"
"""Installs all of them."""

__all__ = ["AFTER_A_TAKE", "INSTALL", "OURS", "PEERS", "TIMEOUT_S", "Job", "versions"]


def versions() -> dict[str, str]:
    """Return the version of each system that is installed; print those that are not."""
    found = {}
    for name in OURS + PEERS:
        try:
            found[name] = importlib.import_module(f"benchmarks.systems.{name}").version()
        except ImportError as error:
            print(f"{name}: not installed ({error}); {INSTALL}", flush=True)
    return found
