"""The warning of a maker that ends before all of its groups are in Redis."""

from __future__ import annotations

import re
from typing import cast

import pytest

from redrb.connection.stop import Stop
from redrb.errors import SendFailed, StoreUnavailable
from redrb.stream.sending import ExperienceSender
from redrb.train.graceful_sending import GracefulSender


class FullSender:
    """Finds no room, as `ExperienceSender` does whose trainers have ended."""

    def __init__(self, cause: Exception | None) -> None:
        self._cause = cause

    def flush(self) -> None:
        raise self._failed("are not stored after 0.1 s")

    def close(self, *, timeout: float | None) -> None:
        raise self._failed("were not stored in time, and are given up")

    def _failed(self, what: str) -> SendFailed:
        failure = SendFailed(f"32 groups {what}: trainers may be behind", unsent=32)
        failure.__cause__ = self._cause
        return failure


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (None, "for which there was no room in time: trainers have ended, or are behind (`redrb"),
        (StoreUnavailable("Redis is away", where="h"), "which could not be put: Redis is away"),
    ],
)
def test_groups_that_are_given_up_are_counted_in_one_warning(
    cause: Exception | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    stop = Stop()
    stop.ask("SIGTERM")
    sender = cast(ExperienceSender, FullSender(cause))
    graceful = GracefulSender(sender, stop, stop_timeout=0.1)
    graceful.flush()
    graceful.close("maker-1", 1.0)
    (message,) = caplog.messages
    assert message.startswith(f"maker 'maker-1' ends: 32 groups are given up, {words}")
    assert len(re.findall("32", message)) == len(re.findall("given up", message)) == 1
