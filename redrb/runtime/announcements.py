"""How makers learn of weights: trainers announce versions to the makers that they name, and to all.

A trainer that has ended its job announces that in the same way, with its newest versions.

A trainer posts each announcement to the stream of every maker that it names, and to one stream of
the trainer, which is read by makers that no trainer names. A stream keeps only its newest message,
so that a maker which starts late, or restarts, finds it. Announcing a version twice does no harm.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from redrb.connection import Client
from redrb.connection.messages import MessageReader, post
from redrb.errors import ConfigError, DecodeError
from redrb.keys import check_name
from redrb.weights.wire.manifest import MAX_VERSION

_RUN = re.compile(r"([0-9a-f]{32})?")

MAX_REASON = 500
"""Most characters of the reason for which a job is over."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """The newest weights of a trainer.

    Attributes:
        trainer: Name of the trainer.
        full: Version of its newest full update; 0 if there is none yet.
        partial: Version of its newest partial update; 0 if there is none after the full one.
        run: Random id of the publishing process, 32 hex digits or "". If it changes, versions may
            have started again from 1, in a Redis that was emptied.
        ended: Why the job is over; "": it goes on.
        reward: The evaluated reward at which the job was over with these weights; None: unknown.
        settings: Text of each setting of the trainer in which its makers must agree with it.
    """

    trainer: str
    full: int
    partial: int = 0
    run: str = ""
    ended: str = ""
    reward: float | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


def announce(client: Client, keys: Sequence[str], announcement: Announcement) -> None:
    """Post an announcement, which wakes the makers that wait for one.

    Raises:
        StoreUnavailable: Redis stayed away; some makers may have the announcement.
    """
    post(client, keys, asdict(announcement))


class AnnouncementReader:
    """Reads the newest announcement of one stream, or waits for one."""

    def __init__(self, client: Client, key: str) -> None:
        self._messages = MessageReader(client, key)

    def newest(self, wait_s: float = 0.0) -> Announcement | None:
        """Return the newest announcement, or None if it was returned before.

        Args:
            wait_s: Seconds to wait for one, without polling.

        Raises:
            DecodeError: The announcement is damaged; the next call skips it.
            StoreUnavailable: Redis stayed away.
        """
        message = self._messages.newest(wait_s)
        return None if message is None else _checked(message)


def _checked(message: dict[str, Any]) -> Announcement:
    trainer, run = message.get("trainer"), message.get("run", "")
    versions = [message.get(name, 0) for name in ("full", "partial")]
    usable = all(type(version) is int and 0 <= version <= MAX_VERSION for version in versions)
    ended = message.get("ended", "")
    if not isinstance(ended, str) or len(ended) > MAX_REASON:
        raise DecodeError("an announcement of weights is damaged: the reason of the job's end.")
    reward = message.get("reward")
    if reward is not None and not (isinstance(reward, float) and math.isfinite(reward)):
        raise DecodeError("an announcement of weights is damaged: the reward at the job's end.")
    if not usable or not isinstance(run, str) or not _RUN.fullmatch(run):
        raise DecodeError("an announcement of weights is damaged: its versions or its run.")
    if not isinstance(trainer, str):
        raise DecodeError("an announcement of weights is damaged: it names no trainer.")
    try:
        check_name("trainer", trainer)
    except ConfigError as error:
        raise DecodeError(f"an announcement of weights is damaged: {error}") from error
    settings = message.get("settings", {})
    if not isinstance(settings, dict) or not all(
        isinstance(word, str) for item in settings.items() for word in item
    ):
        raise DecodeError("an announcement of weights is damaged: the trainer's settings.")
    full, partial = versions
    return Announcement(trainer, full, partial, run, ended, reward, settings)
