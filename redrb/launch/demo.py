"""`redrb demo`: a run of the recipe `sorting` that leaves nothing in Redis."""

from __future__ import annotations

import time
import uuid
from dataclasses import asdict
from pathlib import Path

from redrb.launch.folder import RunFolder
from redrb.launch.job import Job
from redrb.launch.run import Run, Show
from redrb.launch.settings import STOP_TIMEOUT_S, DemoSettings, LaunchSettings
from redrb.recipes.sorting import Sorting

HARD_END_S = 20.0
"""Seconds after the trainer's time limit at which the demo ends a trainer that still runs."""

_OF_THE_RUN = ("url", "makers", "out")
"""Options of the demo that are no settings of its recipe, or no flags."""


def run_demo(settings: DemoSettings, *, as_json: bool, show: Show | None = None) -> int:
    """Run the demo; returns 0 if it has learned and all is in order.

    Raises:
        ConfigError: An option cannot be used.
        StoreError: Redis cannot be reached.
    """
    given = {name: value for name, value in asdict(settings).items() if name not in _OF_THE_RUN} | {
        "namespace": f"demo-{int(time.time())}-{uuid.uuid4().hex[:8]}",
        "stop_timeout": STOP_TIMEOUT_S,
    }
    job = Job(
        title="redrb demo",
        name="sorting",
        recipe=Sorting(url=settings.url, **given),
        given=given,
        makers=settings.makers,
        restarts=LaunchSettings().restarts,
        inherits=False,  # settings for other runs do not change this one
        most_seconds=settings.max_seconds + HARD_END_S,
    )
    folder = RunFolder(Path(settings.out))
    return Run(job, folder, temporary=True, as_json=as_json, show=show).run()
