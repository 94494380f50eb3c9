"""Options of one stream object: they do not belong to its task, and are not stored."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from redrb.checks import check_choice, checked_int, checked_int_or_none
from redrb.errors import ConfigError
from redrb.keys import check_name
from redrb.stream.put.filters import Filter, check_filters
from redrb.stream.put.refusals import DEFAULT_CHECKS, Check, OnBadGroup, checked_checks
from redrb.stream.put.room import OnFull
from redrb.stream.take.rollout_reading import GroupReader

LEASE_MS = 30_000
"""Default of `lease_ms`."""

LEAST_LEASE_MS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Options of one stream object, checked; `ExperienceStream` describes them."""

    group: str = "default"
    on_full: OnFull = "block"
    lease_ms: int = LEASE_MS
    filters: Sequence[Filter] = ()
    min_replicas: int | None = None
    checks: Collection[Check] = DEFAULT_CHECKS
    on_bad_group: OnBadGroup = "raise"
    reader: GroupReader | None = None

    def __post_init__(self) -> None:
        check_name("consumer group", self.group)
        check_choice("on_full", self.on_full, get_args(OnFull))
        check_choice("on_bad_group", self.on_bad_group, get_args(OnBadGroup))
        if self.reader is not None and not callable(self.reader):
            raise ConfigError(
                f"reader={self.reader!r:.80}: give a function of a group's samples, such as "
                "redrb.compat.xtuner.RolloutReader()."
            )
        self._set("lease_ms", checked_int("lease_ms", self.lease_ms, LEAST_LEASE_MS))
        self._set("min_replicas", checked_int_or_none("min_replicas", self.min_replicas, 0))
        self._set("filters", check_filters(self.filters))
        self._set("checks", checked_checks(self.checks))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
