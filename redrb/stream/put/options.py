"""The options of a put that hold for all its groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from redrb.checks import checked_int_or_none, checked_number
from redrb.errors import ConfigError
from redrb.experience import Status
from redrb.experience.records import Scalar
from redrb.stream.arguments import AnyStatus, checked_status
from redrb.stream.put.rights import RightsSource
from redrb.stream.put.sources import NO_SOURCES, Sources


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOptions:
    """Options that hold for all groups of a put, checked.

    Attributes:
        policy_version: Policy version of samples that have none.
        status: Status of the groups; None: derived from their samples.
        tags: Values of declared tags, in place of those of the samples.
        admission: The rights that the groups use; None: none.
        sources: The sources of forwarded groups.
        begun_ns: Time at which the groups were begun, for their traces, in ns since 1970; 0: that
            of their rights.
    """

    policy_version: int | None = None
    priority: float | None = None
    status: Status | None = None
    tags: Mapping[str, Scalar | None] | None = None
    admission: RightsSource | None = None
    sources: Sources = NO_SOURCES
    begun_ns: int = 0

    @classmethod
    def checked(
        cls,
        policy_version: object,
        priority: object,
        status: AnyStatus | None,
        tags: Mapping[str, Scalar | None] | None,
        admission: RightsSource | None = None,
    ) -> PutOptions:
        """Return the options that users gave; raises ConfigError if one is not usable."""
        if not (tags is None or isinstance(tags, Mapping)):
            raise ConfigError(f"tags={tags!r:.80}: give a dict, a value for each tag.")
        if not (admission is None or isinstance(admission, RightsSource)):
            raise ConfigError(f"admission={admission!r:.80}: give what stream.admit() returned.")
        return cls(
            policy_version=checked_int_or_none("policy_version", policy_version),
            priority=None if priority is None else checked_number("priority", priority),
            status=None if status is None else checked_status(status),
            tags=tags,
            admission=admission,
        )
