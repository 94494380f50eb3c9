"""Replies of a gateway: slow readers hold a bounded number of bytes for a bounded time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from redrb.gateway import replies as module
from redrb.gateway.messages import Refused
from redrb.gateway.replies import PART_BYTES, Replies

SCOPE: dict[str, Any] = {"type": "http"}


async def receive() -> Any:
    raise AssertionError


def sent(data: bytes) -> list[dict[str, Any]]:
    """Return what is sent to a client that reads."""
    found: list[dict[str, Any]] = []

    async def send(event: Any) -> None:
        found.append(event)

    replies = Replies()
    asyncio.run(replies.of(data, "text/event-stream")(SCOPE, receive, send))
    assert replies.unread == 0
    return found


@pytest.mark.parametrize(
    "length", [0, 1, PART_BYTES, PART_BYTES + 1, 100 * PART_BYTES], ids=lambda length: f"{length}"
)
def test_a_reply_is_sent_whole_in_parts(length):
    data = bytes(index % 251 for index in range(length))
    head, *parts = sent(data)
    assert dict(head["headers"])[b"content-length"] == b"%d" % length
    assert b"".join(each.get("body", b"") for each in parts) == data
    assert max(len(each.get("body", b"")) for each in parts) <= PART_BYTES
    assert [each.get("more_body", False) for each in parts] == [True] * (len(parts) - 1) + [False]


def test_a_reply_that_is_not_read_is_given_up(monkeypatch):
    monkeypatch.setattr(module, "READ_S", 0.05)
    replies, begun = Replies(), []

    async def send(event: Any) -> None:
        begun.append(event)
        if len(begun) == 3:
            assert replies.unread == 5 * PART_BYTES
            await asyncio.Event().wait()

    reply = replies.of(bytes(5 * PART_BYTES), "application/json")
    asyncio.run(reply(SCOPE, receive, send))
    assert (len(begun), replies.unread) == (3, 0)


def test_replies_that_are_not_read_are_bounded_together(monkeypatch):
    monkeypatch.setattr(module, "ALL_UNREAD", 10)

    async def main() -> None:
        replies, read, waits = Replies(), asyncio.Event(), asyncio.Event()

        async def send(_: Any) -> None:
            waits.set()
            await read.wait()

        def asked(length: int) -> Any:
            return replies.of(bytes(length), "application/json")(SCOPE, receive, send)

        first = asyncio.create_task(asked(6))
        await waits.wait()
        with pytest.raises(Refused) as caught:
            await asked(5)
        assert (caught.value.status, replies.unread) == (503, 6)
        read.set()
        await first
        await asked(10)
        assert replies.unread == 0

    asyncio.run(main())
