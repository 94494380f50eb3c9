"""The machine that figures were measured on, and whether anything else kept it busy."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

WATCHED_S = 2.0
"""Seconds for which the machine is watched before a section."""

QUIET_SHARE = 0.5
"""Share of the cores up to which other work leaves figures usable."""


def processor() -> str:
    """Return the model of the processor."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return models[0] if models else platform.machine()


def machine() -> dict[str, Any]:
    """Return what the figures depend on.

    `load_before` is the number of cores that were busy in the two seconds before. The system's load
    average would also count the section that has just ended.
    """
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_before": round(_busy_cores(), 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def disturbed(name: str, run: dict[str, Any]) -> str | None:
    """Return a warning if a section began while the machine was busy.

    Args:
        name: Of the section.
        run: What `machine` returned before it.
    """
    if run["load_before"] <= QUIET_SHARE * run["cores"]:
        return None
    return (
        f"WARNING: section {name} began while other programs kept {run['load_before']:.1f} of "
        f"{run['cores']} cores busy: do not publish its figures"
    )


def _busy_cores() -> float:
    """Watch the processors for a while; returns how many cores were busy."""
    before, began = _idle_s(), time.monotonic()
    time.sleep(WATCHED_S)
    idle = (_idle_s() - before) / (time.monotonic() - began)
    return max(0.0, (os.cpu_count() or 1) - idle)


def _idle_s() -> float:
    """Return the seconds of all cores without work, or waiting for a disk, since the start."""
    fields = Path("/proc/stat").read_text().split(maxsplit=6)
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")
