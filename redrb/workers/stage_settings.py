"""The options of `redrb-stage`: flags or REDRB_* variables."""

from __future__ import annotations

from dataclasses import dataclass

from redrb.errors import ConfigError
from redrb.keys import check_name
from redrb.options import Settings, flag_of, option, url_option, variable_of


@dataclass(frozen=True, kw_only=True)
class StageSettings(Settings):
    """Options of a stage."""

    url: str = url_option(
        "where Redis is, e.g. redis://host:6379/0; a password only in the variable"
    )
    namespace: str = option("default", "keeps experiments on one server apart")
    from_: str = option("", "task that groups are taken from")
    to: str = option("", "task that they are forwarded to")
    group: str = option("default", "consumer group of the stage; each gets every group of samples")
    batch: int = option(16, "most groups of a batch", least=1)
    batched: bool = option(
        False, "call the function with a list of groups, which returns a result for each"
    )
    lease_ms: int = option(
        10_000,
        "ms without a heartbeat after which other stages take over this one's leases",
        least=100,
    )
    min_replicas: int = option(
        0, "replicas of Redis that must have received a group before it leaves its task", least=0
    )
    stop_timeout: float = option(
        20.0, "seconds that the stage may spend on Redis after SIGTERM or Ctrl-C", least=0
    )
    tracing: bool = option(
        False, "trace the groups whose makers trace them with OpenTelemetry (variables OTEL_*)"
    )
    threads: int = option(1, "CPU threads of torch", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("from_", "to"):
            if not getattr(self, name):
                raise ConfigError(f"{flag_of(name)} TASK (or {variable_of(name)}) is missing.")
        for name in ("namespace", "from_", "to", "group"):
            check_name(flag_of(name), getattr(self, name))
