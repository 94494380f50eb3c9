"""Settings of `ExperienceMakerHolder` in groups, each checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redrb.errors import ConfigError
from redrb.keys import check_name


@dataclass(frozen=True, slots=True)
class SendSettings:
    """How a maker sends experience.

    Attributes:
        trainers: Trainers that get the experience, sample by sample in turn.
        offload: Whether experience is copied to the CPU in the loop.
        max_unsent: Most groups that were made and are not in Redis yet.
        room_timeout: Seconds for which a maker that was asked to end waits for room.
        stream_options: Further options of `ExperienceStream`.
        admission: Whether the maker asks for rights to begin groups.

    Raises:
        ConfigError: `trainers` is no list of at least one name.
    """

    trainers: Sequence[str]
    offload: bool
    max_unsent: int
    room_timeout: float
    stream_options: Mapping[str, Any]
    admission: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.trainers, str) or not self.trainers:
            raise ConfigError(
                "detached_trainer_name_list is a list of at least one trainer's name."
            )
        for trainer in self.trainers:
            check_name("trainer", trainer)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSettings:
    """How a maker gets weights.

    Attributes:
        follow: Trainer whose weights it takes while no trainer names it.
        wait_for_first: Whether to wait for a full update before the first batch.
        first_timeout: Seconds to wait for it.
        update_timeout: Seconds between two calls of an update in chunks, until it is dropped.
        in_flight: Whether weights change between two tokens as well.
        agree: Text of each setting in which the trainer must agree with the maker.
    """

    follow: str
    wait_for_first: bool
    first_timeout: float
    update_timeout: float
    in_flight: bool
    agree: Mapping[str, str] = field(default_factory=dict)
