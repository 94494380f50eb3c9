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

PEERS: tuple[str, ...] = ()
"""Other systems, which run where they are installed."""

__all__ = ["OURS", "PEERS", "TIMEOUT_S", "Job", "versions"]


def versions() -> dict[str, str]:
    """Return the version of each system that is installed."""
    found = {}
    for name in OURS + PEERS:
        try:
            found[name] = importlib.import_module(f"benchmarks.systems.{name}").version()
        except ImportError:
            continue
    return found
