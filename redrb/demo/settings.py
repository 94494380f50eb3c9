"""What the demo can be told. Nothing heavy is imported here: `redrb --help` reads it."""

from __future__ import annotations

from dataclasses import dataclass

from redrb.options import option


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What the demo can be told; everything else is what the workers do by default."""

    url: str = option("", "use this Redis; default: start an embedded one")
    makers: int = option(2, "maker processes")
    seed: int = option(0, "seed of the run")
    target_reward: float = option(0.97, "held-out reward at which the trainer ends")
    max_seconds: float = option(90.0, "seconds of training after which it ends anyway")
    out: str = option("demo-run", "directory for the curve and the workers' metrics")
