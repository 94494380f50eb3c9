"""The options of `redrb run` beside those of its recipe, and of `redrb demo`."""

from __future__ import annotations

from dataclasses import dataclass

from redrb.options import Settings, option, url_option

STOP_TIMEOUT_S = 10.0
"""Seconds that a worker of the demo may spend on Redis after SIGTERM."""


@dataclass(frozen=True, kw_only=True)
class LaunchSettings(Settings):
    """The options of `redrb run` beside the settings of its recipe."""

    makers: int = option(2, "maker processes", least=1)
    out: str = option(
        "",
        "folder for metrics, logs, checkpoints, and the data of a Redis that is started "
        "here; default: runs/ and the recipe's name",
    )
    restarts: int = option(
        4,
        "restarts of a process, one after another, that ends within a minute each time; then it is "
        "given up",
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class DemoSettings(Settings):
    """The options of `redrb demo`; the workers run with their defaults otherwise."""

    url: str = url_option("use this Redis; default: start an embedded one")
    min_replicas: int = option(
        0, "replicas of Redis that must have received a put before it returns", least=0
    )
    makers: int = option(2, "maker processes", least=1)
    seed: int = option(0, "seed of the run", least=0, most=2**63 - 1)
    max_staleness: int = option(
        2, "most weight versions that a trained group may be behind; -1: no bound", least=-1
    )
    target_reward: float = option(
        0.97, "held-out reward at which the trainer ends; inf: none, it ends after --max-seconds"
    )
    max_seconds: float = option(90.0, "seconds of training after which it ends anyway", above=0)
    out: str = option("demo-run", "directory for the workers' metrics")
