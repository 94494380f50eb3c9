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

INSTALL = "pip install -c constraints.txt '.[bench]'"
"""Installs all of them."""

__all__ = ["INSTALL", "OURS", "PEERS", "TIMEOUT_S", "Job", "versions"]


def versions() -> dict[str, str]:
    """Return the version of each system that is installed; print those that are not."""
    found = {}
    for name in OURS + PEERS:
        try:
            found[name] = importlib.import_module(f"benchmarks.systems.{name}").version()
        except ImportError as error:
            print(f"{name}: not installed ({error}); {INSTALL}", flush=True)
    return found
