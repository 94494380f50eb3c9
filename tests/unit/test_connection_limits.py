"""Timeouts of a connection that another thread closes at the same moment."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from redrb.connection.deadline import Deadline
from redrb.connection.lending import limited


class Closing:
    """A connection whose socket is closed before its timeout is set for the `failing`-th time."""

    usual_timeout = 60.0

    def __init__(self, failing: int) -> None:
        self._left = failing

    def update_current_socket_timeout(self, _: float | None) -> None:
        self._left -= 1
        if self._left == 0:
            raise OSError(9, "Bad file descriptor")


def test_a_closed_socket_is_a_connection_error():
    connection: Any = Closing(1)
    with Deadline(at_most=1.0), pytest.raises(redis.ConnectionError), limited(connection):
        pytest.fail("nothing may be sent")


def test_a_reply_that_came_before_the_close_is_kept():
    connection: Any = Closing(2)
    with Deadline(at_most=1.0), limited(connection):
        pass


def test_an_error_of_the_call_is_not_hidden_by_the_close():
    connection: Any = Closing(2)
    with Deadline(at_most=1.0), pytest.raises(redis.TimeoutError), limited(connection):
        raise redis.TimeoutError
