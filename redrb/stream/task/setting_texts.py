"""Settings of a task as texts such as "limit=32", which `redrb set` reads and prints."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from redrb.errors import ConfigError
from redrb.stream.task.rate import RateLimit
from redrb.stream.task.settings import NUMBERS

_NUMBER = re.compile(r"\d{1,16}")
_RATE = re.compile(r"(at_least|queue|ratio)\(([\d., ]+)\)")


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Return settings by name, None for "none"; raises ConfigError for an unusable text."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text!r:.80}: write NAME=VALUE, such as limit=32.")
        if name in found:
            raise ConfigError(f"{name} is given twice.")
        found[name] = None if value == "none" else _value(name, value)
    return found


def shown_value(name: str, stored: str) -> str:
    """Return a value of `StoredSettings` as `parse_settings` reads it, such as "queue(4)"."""
    return _rate_text(stored) if name == "rate" else stored


def _value(name: str, text: str) -> Any:
    if name in NUMBERS:
        if not _NUMBER.fullmatch(text):
            raise ConfigError(f"{name}={text!r:.80}: write a number, or none.")
        return int(text)
    if name == "groups_per_version":
        return _number(text)
    if name == "tags":
        return [tag for tag in text.split(",") if tag]
    return _rate(text) if name == "rate" else text


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{text!r:.80}: write a number, or none.") from error


def _rate(text: str) -> RateLimit:
    matched = _RATE.fullmatch(text)
    make: Callable[..., RateLimit] | None = matched and _MAKERS[matched[1]]
    try:
        numbers = list(map(float, matched[2].split(","))) if matched else []
        if make is not None:
            return make(*numbers)
    except (TypeError, ValueError, OverflowError):
        pass  # too many or too few numbers, or none
    raise ConfigError(
        f"rate={text!r:.80}: write at_least(SIZE), queue(SIZE) or "
        "ratio(SAMPLES_PER_INSERT,MIN_SIZE,ERROR_BUFFER)."
    )


def _rate_text(stored: str) -> str:
    """Return the rate with these numbers as text; one that no text gives as its numbers."""
    try:
        per_insert, size, least, most = map(float, stored.split(" "))
    except ValueError:
        return stored
    buffer = per_insert * size - least
    texts = (
        f"at_least({size:.15g})",
        f"queue({most:.15g})",
        f"ratio({per_insert:.15g},{size:.15g},{buffer:.15g})",
    )
    for text in texts:
        with suppress(ConfigError):
            if str(_rate(text)) == stored:
                return text
    return stored


def _ratio(samples_per_insert: float, min_size: float, error_buffer: float) -> RateLimit:
    return RateLimit.ratio(samples_per_insert, min_size=int(min_size), error_buffer=error_buffer)


_MAKERS: dict[str, Callable[..., RateLimit]] = {
    "at_least": lambda size: RateLimit.at_least(int(size)),
    "queue": lambda size: RateLimit.queue(int(size)),
    "ratio": _ratio,
}
