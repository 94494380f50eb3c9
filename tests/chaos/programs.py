"""The workers of a run by role; imported once by the process that forks all of them."""

from __future__ import annotations

import multiprocessing
import os
import threading

from tests.chaos import (
    hoarders,
    makers,
    operators,
    rollouts,
    stages,
    tables,
    trainers,
    weights,
)
from tests.chaos.options import Place
from tests.chaos.worker import Worker, serve

ROLES: dict[str, type[Worker]] = {
    "put": makers.Putter,
    "put_many": makers.ManyPutter,
    "writer": makers.Writes,
    "sender": makers.Sends,
    "steps": makers.StepsPutter,
    "fill": makers.Fills,
    "parts0": rollouts.Parts,
    "parts1": rollouts.Parts,
    "admitted": rollouts.Admitted,
    "configure": operators.Configures,
    "requeue": operators.Requeues,
    "stage": stages.Forwards,
    "take": trainers.Takes,
    "leases": trainers.Loops,
    "loader": trainers.Loads,
    "ranks": trainers.Ranks,
    "hoard0": hoarders.Hoards,
    "hoard1": hoarders.Hoards,
    "hoard2": hoarders.Hoards,
    "heir": hoarders.Inherits,
    "table_writer": tables.Writes,
    "table_claimer0": tables.Claims,
    "table_claimer1": tables.Claims,
    "table_marker": tables.Marks,
    "publisher": weights.Publishes,
    "poll": weights.Polls,
    "wait": weights.Waits,
    "shared": weights.Shares,
    "shared_too": weights.Shares,
    "standby": weights.Swaps,
}

HEIR = "heir"
"""The role that is not there at first: it begins when the hoarders have ended."""


def run(role: str, name: str, place: Place) -> None:
    """Run one worker in this process."""
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    os.environ["TMPDIR"] = str(place.directory / "tmp")
    serve(ROLES[role], name, place)


def _end_with_the_run() -> None:
    """End this process when the one that started it is gone, also by a kill."""
    starter = multiprocessing.parent_process()
    starter.join()
    os._exit(1)
