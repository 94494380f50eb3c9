"""The options of a put that hold for all its groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from redrb.errors import ConfigError
from redrb.experience.records import Scalar
from redrb.stream.arguments import AnyStatus, checked_status, finite, whole_or_none


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOptions:
    """What a put says of all its groups; None: nothing, or what their samples say."""

    policy_version: int | None = None
    priority: float | None = None
    status: AnyStatus | None = None
    tags: Mapping[str, Scalar | None] | None = None

    def __post_init__(self) -> None:
        checked: dict[str, object] = {
            "policy_version": whole_or_none("policy_version", self.policy_version),
            "priority": None if self.priority is None else finite("priority", self.priority),
            "status": None if self.status is None else checked_status(self.status),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if not (self.tags is None or isinstance(self.tags, Mapping)):
            raise ConfigError(f"tags={self.tags!r:.80}: give a dict, a value for each tag.")
