"""Checks of the settings in a saved task's file, which may come from an untrusted source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, get_args

from redrb.checks import MOST, check_choice
from redrb.orders import known_order
from redrb.stream.saving.records import settings_of
from redrb.stream.task.rate import RateLimit
from redrb.stream.task.settings import NUMBERS, WIRE_FORMAT, Eviction, OnExpired, TaskSettings
from redrb.stream.task.tags import declare_tags

_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,15}")
_DEFAULT: Final = "default_"
_OTHER_NUMBERS: Final = {
    "keep_ms": 1,
    "generation": 0,
    "reordered": 1,
    f"{_DEFAULT}max_reads": 0,
    f"{_DEFAULT}max_deliveries": 1,
    f"{_DEFAULT}max_dead": 0,
}
_UNSORTED: Final = re.compile(r"[0-9]{1,16} [0-9]{1,16}")
_NOT_SETTINGS: Final = frozenset({"rules"})


def check_saved_settings(settings: Mapping[str, str], tags: tuple[str, ...]) -> None:
    """Check each setting of a saved task as one of a new task is checked.

    A capacity and a limit may both be there: two processes can have given them to the task.

    Args:
        tags: The names of tags that they declare.

    Raises:
        ValueError: A setting has a value that redrb does not store.
    """
    if settings_of(settings) != settings or _NOT_SETTINGS & settings.keys():
        raise ValueError("a counter is among them")
    if settings.get("format", str(WIRE_FORMAT)) != str(WIRE_FORMAT):
        raise ValueError("the format")
    for name, least in {**NUMBERS, **_OTHER_NUMBERS}.items():
        if name in settings:
            _number(settings, name, least)
    if "groups_per_version" in settings:
        text = settings["groups_per_version"]
        if TaskSettings(groups_per_version=float(text)).as_stored()["groups_per_version"] != text:
            raise ValueError(f"groups_per_version={text!r:.80}")
    declare_tags(tags)
    name, sampled = settings.get("order", "fifo"), settings.get("sampled", "0")
    order = known_order(name)
    if sampled not in ("0", "1") or (order is not None and str(int(order.sampled)) != sampled):
        raise ValueError(f"sampled={sampled!r:.80} in the order {name!r:.80}")
    if "unsorted" in settings and (not _UNSORTED.fullmatch(settings["unsorted"]) or order is None):
        raise ValueError("groups that are not sorted")
    if "rate" in settings:
        _check_rate(settings)
    for name, choices in (("on_expired", OnExpired), ("eviction", Eviction)):
        if name in settings:
            check_choice(name, settings[name], get_args(choices))


def _number(settings: Mapping[str, str], name: str, least: int) -> None:
    text = settings[name]
    if not _NUMBER.fullmatch(text) or not least <= int(text) <= MOST:
        raise ValueError(f"{name}={text!r:.80}")


def _check_rate(settings: Mapping[str, str]) -> None:
    text = settings["rate"]
    per_insert, size, least, most = text.split(" ")
    if str(RateLimit(float(per_insert), int(size), float(least), float(most))) != text:
        raise ValueError(f"rate={text!r:.80}")
    for name in ("limit", "capacity"):
        if 0 < int(settings.get(name, "0")) < int(size):
            raise ValueError(f"{name}={settings[name]} with a rate whose min_size is {size}")
